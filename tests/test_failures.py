"""What a failed request means, as a table."""

from datetime import UTC, datetime

import orjson
import pytest

from promptmill.endpoints import NO_KEY, Endpoint
from promptmill.errors import EndpointError, RefusedError, TransientModelError
from promptmill.failures import AttemptError, Patience, RetryPolicy, http_error
from promptmill.verdicts import HttpFailure, Verdict, named_wait_s, reported_failure, retry_after_s, verdict_on

WAIT, RETRY, REFUSE, CONTEXT, REJECT, ACCOUNT, MODEL = Verdict

CASES = [
    (429, "Rate limit reached for requests", {}, WAIT),
    (429, "Quota exceeded for quota metric 'requests' and limit 'requests per minute'", {}, WAIT),
    (429, "You exceeded your current quota. Please try again in 20s", {}, WAIT),
    (429, "You exceeded your current quota, please check your plan and billing details", {}, ACCOUNT),
    (429, "Insufficient credits", {}, ACCOUNT),
    (529, "overloaded", {}, WAIT),
    (503, "no capacity", {}, RETRY),
    (503, "no capacity", {"retry-after": "3"}, WAIT),
    (500, "oops", {}, RETRY),
    (502, "<html>bad gateway</html>", {}, RETRY),
    (408, "timeout", {}, RETRY),
    (401, "Incorrect API key provided", {}, ACCOUNT),
    (402, "Payment required", {}, ACCOUNT),
    (403, "not allowed for this key", {}, ACCOUNT),
    (403, "Input flagged by moderation", {}, REFUSE),
    (404, "No endpoints found", {}, MODEL),
    (400, "openai/gpt-9 is not a valid model ID", {}, MODEL),
    (400, "The model `x` does not exist", {}, MODEL),
    (400, '"auto" tool choice requires --enable-auto-tool-choice', {}, MODEL),
    (400, "This model's maximum context length is 8192 tokens", {}, CONTEXT),
    (413, "Payload too large", {}, CONTEXT),
    (400, "The response was filtered due to Azure's content management policy", {}, REFUSE),
    (400, "messages: text must not be empty", {}, REJECT),
    (422, "unprocessable", {}, REJECT),
    (418, "teapot", {}, REJECT),
    (400, "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing", {}, ACCOUNT),
    (400, "You have reached your specified API usage limits. You will regain access on 2026-12-01", {}, ACCOUNT),
    (400, "API key not valid. Please pass a valid API key.", {}, ACCOUNT),
    (412, "Account me is suspended, possibly due to reaching the monthly spending limit", {}, ACCOUNT),
    (403, "Key limit exceeded (monthly limit). Manage it using https://openrouter.ai/settings/keys", {}, ACCOUNT),
    (429, "Your account org-1<ak-1> is suspended, please check your plan and billing details", {}, ACCOUNT),
    (429, "Rate limit exceeded: free-models-per-day. Add 10 credits to unlock 1000 free model requests", {}, ACCOUNT),
    (429, "Rate limit reached on requests per day (RPD): Limit 100. Please try again in 14m24s", {}, ACCOUNT),
    (429, "Rate limit reached on tokens per day (TPD): Limit 100. Please try again in 7m3.36s", {}, WAIT),
    (429, "Rate limit exceeded: free-models-per-day", {"retry-after": "9"}, WAIT),
    (429, "Rate limit exceeded: free-models-per-min.", {}, WAIT),
    (429, "Resource has been exhausted (e.g. check quota).", {}, WAIT),
    (400, "Invalid tool message 3: cat: model.py: file not found", {}, REJECT),
    (400, "model: gpt-9 does not exist", {}, MODEL),
    (400, "Model Not Exist", {}, MODEL),
    (400, "temperature is not supported with this model", {}, REJECT),
    (404, "No endpoints found that support tool use", {}, MODEL),
]


@pytest.mark.parametrize(("status", "said", "headers", "verdict"), CASES)
@pytest.mark.parametrize("shape", ["error object", "bare object", "text"])
def test_the_table(status, said, headers, verdict, shape):
    body = {"error object": {"error": {"message": said}}, "bare object": {"message": said}, "text": None}[shape]
    assert verdict_on(HttpFailure(status, body, said, headers)) is verdict


def test_a_provider_s_code_counts_as_its_words_do():
    assert verdict_on(HttpFailure(429, {"error": {"code": "insufficient_quota", "message": "no"}})) is ACCOUNT
    assert verdict_on(HttpFailure(400, {"error": {"code": "model_not_found", "message": "no"}})) is MODEL


def test_a_flagged_prompt_is_refused_whatever_it_is_called():
    body = {"error": {"message": "no", "metadata": {"reasons": ["violence"]}}}
    assert verdict_on(HttpFailure(403, body)) is REFUSE


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-4"}, None),
        ({"retry-after-ms": "-4"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Sun, 29 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sun, 29 Nov 2026 11:00:00 GMT"}, 0.0),
    ],
)
def test_what_an_endpoint_asks_to_wait(headers, seconds):
    assert retry_after_s(headers, now=datetime(2026, 11, 29, 12, tzinfo=UTC)) == seconds


class NoChance:
    """A generator that draws the least."""

    def uniform(self, low, high):
        return low


def refused():
    error = AttemptError("busy")
    error.was_refused = True
    return error


def test_refusals_are_counted_apart_from_failures():
    patience = Patience(RetryPolicy(max_attempts=2, max_refusals=3), NoChance())
    assert [patience.wait_s(refused()), patience.wait_s(AttemptError("x")), patience.wait_s(refused())] == [
        0.5,
        0.5,
        1.0,
    ]
    with pytest.raises(TransientModelError, match=r"busy \(after 4 attempts\)"):
        patience.wait_s(refused())


def test_the_last_attempt_raises_what_the_failure_is_for_good():
    patience = Patience(RetryPolicy(max_attempts=1), NoChance())
    with pytest.raises(RefusedError):
        patience.wait_s(AttemptError("nothing said", final=RefusedError))


@pytest.mark.parametrize("asked_s", [None, 0.0, 0.1])
def test_no_wait_is_shorter_than_our_own(asked_s):
    patience = Patience(RetryPolicy(), NoChance())
    assert [patience.wait_s(AttemptError("x", retry_after_s=asked_s)) for _ in range(3)] == [0.5, 1.0, 2.0]


def test_a_wait_asked_for_is_capped():
    patience = Patience(RetryPolicy(max_retry_after_s=10), NoChance())
    assert patience.wait_s(AttemptError("x", retry_after_s=86_400)) == 10


# ── whose fault it is ─────────────────────────────────────────────────────────────────────────────────────

GEMINI_PER_MINUTE = {
    "code": 429,
    "message": "You exceeded your current quota, please check your plan and billing details. For more information on "
    "this error, head to: https://ai.google.dev/gemini-api/docs/rate-limits. To monitor your current usage, head to: "
    "https://ai.dev/rate-limit. " + "* Quota exceeded for metric: generativelanguage.googleapis.com/requests " * 8
    + "Please retry in 2.5s.",
    "status": "RESOURCE_EXHAUSTED",
    "details": [
        {"@type": "QuotaFailure", "violations": [{"quotaId": "GenerateRequestsPerMinutePerProjectPerModel-FreeTier"}]},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2s"},
    ],
}  # fmt: skip


def as_sent(error, status=429, *, in_list=True, **known):
    body = [{"error": error}] if in_list else {"error": error}
    return HttpFailure(status, body, orjson.dumps(body).decode(), **known)


def test_a_quota_by_the_minute_is_waited_for_as_long_as_gemini_says():
    failure = as_sent(GEMINI_PER_MINUTE)
    assert (verdict_on(failure), named_wait_s(failure)) == (WAIT, 2.5)
    assert len(failure.said) == 500


def test_a_quota_by_the_minute_that_names_no_time_is_told_by_its_details():
    details = GEMINI_PER_MINUTE["details"][:1]
    error = {"message": "You exceeded your current quota", "details": details}
    assert verdict_on(as_sent(error)) is WAIT
    details = [{"violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}]
    assert verdict_on(as_sent({"message": "Quota exceeded", "details": details})) is ACCOUNT


def test_a_wrong_key_is_told_by_the_reason_in_geminis_details():
    error = {"code": 400, "message": "Invalid.", "details": [{"reason": "API_KEY_INVALID"}]}
    assert verdict_on(as_sent(error, 400)) is ACCOUNT


def test_an_exhausted_account_is_told_by_its_name_whatever_it_says_and_asks():
    for name in ("exceeded_current_quota_error", "insufficient_quota"):
        assert verdict_on(as_sent({"message": "no", "type": name}, headers={"retry-after": "1"})) is ACCOUNT


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("Please try again in 1m2.5s.", 62.5),
        ("please try again after 1 seconds", 1.0),
        ("Please retry after 26 seconds", 26.0),
        ("try again in 6ms", 0.006),
        ("try again in 1 hour and 2 minutes", 3720.0),
        ("try again in a moment", None),
        ("please wait for the 3 suns", None),
    ],
)
def test_a_wait_is_read_from_a_sentence(said, seconds):
    assert named_wait_s(HttpFailure(429, {"message": said})) == (seconds and pytest.approx(seconds))


def test_what_the_request_says_itself_may_be_a_quotation_and_stops_nothing():
    sent = b'{"messages":[{"role":"tool","content":"Incorrect API key provided, or The model x does not exist"}]}'
    for said in ("bad message: Incorrect API key provided", "bad message: The model x does not exist"):
        assert verdict_on(HttpFailure(400, {"message": said}, sent=sent)) is REJECT
        assert verdict_on(HttpFailure(400, {"message": said})) in (ACCOUNT, MODEL)


PROVIDER = {
    "message": "Provider returned error",
    "metadata": {"provider_name": "X", "raw": "credit balance is too low"},
}


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_provider_behind_the_endpoint_stops_no_run(status):
    assert verdict_on(as_sent(PROVIDER, status)) is RETRY
    assert verdict_on(reported_failure(PROVIDER | {"code": status}, has_succeeded=True)) is RETRY
    nameless = {"code": status, "message": "Provider returned error"}
    assert verdict_on(reported_failure(nameless, has_succeeded=True)) is RETRY
    assert verdict_on(reported_failure(nameless)) in (ACCOUNT, MODEL)


def test_a_403_after_a_success_is_about_the_prompt_unless_it_names_the_account():
    known = {"has_succeeded": True}
    assert verdict_on(HttpFailure(403, {"message": "forbidden"}, **known)) is REFUSE
    for said in ("Key limit exceeded (monthly limit)", "Your team has used all available credits"):
        assert verdict_on(HttpFailure(403, {"message": said}, **known)) is ACCOUNT


@pytest.mark.parametrize(
    ("error", "status", "verdict"),
    [
        ({"code": "insufficient_quota", "message": "You exceeded your current quota"}, 429, ACCOUNT),
        ({"code": "401", "message": "Invalid API key"}, 401, ACCOUNT),
        ({"type": "overloaded_error", "message": "Overloaded"}, 529, WAIT),
        ({"code": None, "type": "rate_limit_error", "message": "slow"}, 429, WAIT),
        ({"status": "UNAVAILABLE", "message": "slow"}, 503, RETRY),
        ({"code": 502, "message": "down"}, 502, RETRY),
        ({"error": {"type": "overloaded_error"}}, 529, WAIT),
        ("the reply broke off", 502, RETRY),
        ({"message": "no"}, 502, RETRY),
    ],
)
@pytest.mark.parametrize("has_succeeded", [False, True])
def test_an_error_inside_a_200_is_what_it_would_have_come_with(error, status, verdict, has_succeeded):
    failure = reported_failure(error, has_succeeded=has_succeeded)
    assert (failure.status, verdict_on(failure)) == (status, verdict)


# ── the one sentence ──────────────────────────────────────────────────────────────────────────────────────

HERE = Endpoint("http://10.0.0.7:8000/v1", NO_KEY)
PAGE = "<!DOCTYPE html>\n<html><head><style>body{}</style><title>Login</title></head><body><h1>Go away</h1>"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (HttpFailure(403, None, PAGE), "answered 403: Login Go away; no key was sent: set HOST_10_0_0_7_API_KEY in"),
        (HttpFailure(404, None, PAGE, url="http://10.0.0.7:8000/v1/chat/completions"),
         "http://10.0.0.7:8000/v1/chat/completions answered 404: Login Go away; check --model=m and --base_url, then "),
        (reported_failure({"code": 401, "message": "no"}), "/v1 answered 200 with an error: no; "),
        (HttpFailure(404, {"error": {"message": "No allowed providers are available for the selected model."}}),
         "; check --providers_allowed, --providers_ignored and --providers_order, then start again (a run: with"),
        (HttpFailure(404, {"message": "No endpoints found that support tool use"}), "; m takes no tools here: "),
        (HttpFailure(402, {"error": "no money"}), "answered 402: no money; check the key and the account, then start "),
    ],
)  # fmt: skip
def test_the_sentence_that_stops_a_run_says_what_to_do(failure, said):
    error = http_error(failure, HERE, "m")
    assert isinstance(error, EndpointError)
    assert said in str(error)
    assert "<" not in str(error)
