"""What a failed request means, as a table."""

from datetime import UTC, datetime

import pytest

from promptmill.errors import RefusedError, TransientModelError
from promptmill.failures import AttemptError, HttpFailure, Patience, RetryPolicy, Verdict, retry_after_s, verdict_on

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
        ({"retry-after": "-4"}, 0.0),
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


def test_a_wait_asked_for_is_capped():
    patience = Patience(RetryPolicy(max_retry_after_s=10), NoChance())
    assert patience.wait_s(AttemptError("x", retry_after_s=86_400)) == 10
