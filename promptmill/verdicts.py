"""What a failed request means: one table, by status and by what was said.

What stops the run is read from the endpoint's own words alone: its names for the error, and its message as far as that
quotes nothing of the request. A conversation may be about keys, quotas and models too.

Sources: https://openrouter.ai/docs/api-reference/errors, https://platform.openai.com/docs/guides/error-codes,
https://docs.anthropic.com/en/api/errors, https://ai.google.dev/gemini-api/docs/troubleshooting,
https://platform.moonshot.ai/docs/api/errors, RFC 9110 section 10.2.3 (Retry-After).
"""

import email.utils
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from promptmill.bodies import readable
from toolsets.text import shortened

MAX_SHOWN_CHARS = 500
MAX_SEARCHED_CHARS = 20_000
"""How much of what an endpoint said is looked at."""
SHORT_WAIT_S = 600.0
"""A quota that is back within this time is waited for; one that is not stops the run."""


class Verdict(Enum):
    """What to do about a failed request."""

    WAIT = "the endpoint is asked for too much: wait, and tell the limiter"
    RETRY = "it may pass: try again, a few times"
    REFUSE = "it is about this prompt alone, and would be refused again"
    CONTEXT = "the conversation is too large"
    REJECT = "the request is wrong"
    STOP_ACCOUNT = "every further request would be refused: key, credit or quota"
    STOP_MODEL = "every further request would be refused: no such model or address, or it cannot do this"


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """An answer with an error status, or an error inside an answer with status 200."""

    status: int
    body: object = None
    """Decoded, or its `error` object; None when it is no JSON."""
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    """What was really called."""
    in_reply: bool = False
    """Whether it came with status 200."""
    sent: bytes = b""
    """The request's body: what the endpoint may quote."""
    has_succeeded: bool = False
    """Whether the endpoint has answered a request of ours before: then key, address and model are good."""

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object; empty when the answer has none. Gemini puts it into a list."""
        body = self.body
        if isinstance(body, list):
            body = next((entry for entry in body if isinstance(entry, Mapping)), None)
        body = body if isinstance(body, Mapping) else {}
        inner = body.get("error")
        return inner if isinstance(inner, Mapping) else body

    @property
    def names(self) -> frozenset[str]:
        """The provider's own names for the error, in lower case: machine words, never a quotation."""
        error = self.error
        found = [error.get(name) for name in ("code", "type", "status", "reason")]
        found += [detail.get("reason") for detail in self.details]
        return frozenset(str(name).lower() for name in found if isinstance(name, str | int) and name)

    @property
    def details(self) -> list[Mapping[str, Any]]:
        """What Google adds: reasons, which quota it was, how long to wait."""
        details = self.error.get("details")
        return [entry for entry in details if isinstance(entry, Mapping)] if isinstance(details, list) else []

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What OpenRouter adds."""
        metadata = self.error.get("metadata")
        return metadata if isinstance(metadata, Mapping) else {}

    @property
    def message(self) -> str:
        """The endpoint's sentence, or all that it sent where it has none."""
        said = (self.error.get(name) for name in ("message", "error", "detail"))
        return str(next((text for text in said if text), "")) or readable(self.text)

    @property
    def words(self) -> str:
        """All that was said, what a provider behind the endpoint said included."""
        return f"{self.message[:MAX_SEARCHED_CHARS]}\n{str(self.metadata.get('raw', ''))[:MAX_SEARCHED_CHARS]}"

    @property
    def said(self) -> str:
        """What the endpoint said, in one bounded line."""
        return shortened(" ".join(self.message.split()), MAX_SHOWN_CHARS)


Test = Callable[[HttpFailure], bool]


def _pattern(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


def _mentions(*patterns: str) -> Test:
    """Whether it is among all that was said, or one of the names."""
    pattern = _pattern(*patterns)
    return lambda failure: bool(pattern.search(failure.words) or any(map(pattern.search, failure.names)))


def _says(*patterns: str, names: frozenset[str] = frozenset()) -> Test:
    """Whether the endpoint itself says it, by name or in its message; what is in the request too may be a quotation."""
    pattern = _pattern(*patterns)

    def test(failure: HttpFailure) -> bool:
        found = (match[0].encode() for match in pattern.finditer(failure.message[:MAX_SEARCHED_CHARS]))
        return not names.isdisjoint(failure.names) or any(words not in failure.sent for words in found)

    return test


_too_large = _mentions(
    "context.{0,3}length", "context window", "context size", "maximum context", "too many tokens", "prompt is too long",
    "input token count", "maximum model length", "reduce the length",
)  # fmt: skip
_is_filtered = _mentions(
    "content.?filter", "content.?policy", "content management policy", "moderation", "safety system"
)
_MODEL_NAME = r"['\"`]?(?!(?:is|was|has|does|not)\b)[\w./:@+-]{1,100}['\"`]?"
_no_model = _says(
    "not a valid model", "(unknown|no such) model", "invalid model( name| id)?[: ]", "not found the model",
    r"\bmodel (not found|(does )?not exist)",
    rf"\bmodels?[ :/]+{_MODEL_NAME},? (was |is |has )?(been )?"
    "(not found|does not exist|not available|not supported|no longer supported|decommissioned|deprecated)",
    names=frozenset({"model_not_found", "model_decommissioned", "invalid_model"}),
)  # fmt: skip
_takes_not_this_model = _says("model (is|was) not (supported|available)")
lacks_tools = _says("enable-auto-tool-choice", "support tool use", "does not support tools")
lacks_provider = _says("no allowed providers")

_is_out = _says(
    r"insufficient[ _].{0,15}(credit|balance|fund|quota)",
    r"\b(credit|balance|fund|quota|free tier)s?\b.{0,60}\b(insufficient|exhausted|too low|depleted|used up|run out)\b",
    r"(out of|doesn't have any|no remaining) credits", r"used all (of )?(your |the )?(available )?credits",
    r"exceeded your current quota",
    r"(credit|key|spend|spending|usage|billing) (hard )?limit (was |is )?(exceeded|reached)",
    r"reached (your|its|the) .{0,40}(spend|spending|usage|billing|credit)s? limit",
    r"account.{0,80}\b(suspended|deactivated|disabled|overdue|in arrears|locked)\b", r"\bgood standing\b",
    names=frozenset({
        "insufficient_quota", "exceeded_current_quota_error", "insufficient_credits", "insufficient_balance",
        "billing_hard_limit_reached", "billing_not_active", "account_deactivated", "arrearage",
        "allocationquota.freetieronly",
    }),
)  # fmt: skip
_is_refused_key = _says(
    r"api[ _-]?key\b.{0,30}\b(not valid|invalid|expired|disabled|revoked)",
    r"\b(invalid|incorrect|expired) api[ _-]?key\b",
    names=frozenset({"invalid_api_key", "api_key_invalid", "authentication_error", "unauthenticated"}),
)
_PER_DAY = _pattern(r"per.?(day|week|month)", r"\b(daily|weekly|monthly)\b.{0,20}\b(limit|quota)", r"\b[rt]pd\b")
_PER_MINUTE = _pattern(r"per.?(min|sec|hour)", r"\b[rt]pm\b", "(try again|retry) (in|after)", "slow down")


def _is_about_the_account(failure: HttpFailure) -> bool:
    return _is_out(failure) or _is_refused_key(failure)


def _is_used_up(failure: HttpFailure) -> bool:
    """Whether a refusal is about a quota that is not back soon: credit, or what there is for a day."""
    if not failure.names.isdisjoint({"insufficient_quota", "exceeded_current_quota_error"}):
        return True
    if _is_of_a_provider(failure):
        return False
    is_per_day = bool(_PER_DAY.search(_all_of(failure)))
    if wait_s := named_wait_s(failure):
        is_back_soon = wait_s <= SHORT_WAIT_S
    else:
        is_back_soon = not is_per_day and bool(_PER_MINUTE.search(_all_of(failure)))
    return not is_back_soon and (is_per_day or _is_out(failure))


def _all_of(failure: HttpFailure) -> str:
    """What was said, which quota it was included."""
    return f"{failure.words}\n{failure.text[:MAX_SEARCHED_CHARS]}"


def _was_flagged(failure: HttpFailure) -> bool:
    return not failure.metadata.keys().isdisjoint({"reasons", "flagged_input"})


def _is_of_a_provider(failure: HttpFailure) -> bool:
    """Whether one of the providers behind the endpoint failed, which says nothing about our key or model."""
    is_unnamed = failure.has_succeeded and failure.message.startswith("Provider returned error")
    return is_unnamed or bool(failure.metadata.get("provider_name"))


def _was_good_before(failure: HttpFailure) -> bool:
    return failure.has_succeeded


def _is_inside_a_later_reply(failure: HttpFailure) -> bool:
    return failure.in_reply and failure.has_succeeded


def _always(failure: HttpFailure) -> bool:
    del failure
    return True


TABLE: tuple[tuple[tuple[int, ...], Test, Verdict], ...] = (
    # A limit by the minute that words itself as a quota is waited out; an exhausted quota is not.
    ((429,), _is_used_up, Verdict.STOP_ACCOUNT),
    ((429, 529), _always, Verdict.WAIT),
    ((503,), lambda failure: retry_after_s(failure.headers) is not None, Verdict.WAIT),
    ((403,), _was_flagged, Verdict.REFUSE),
    ((403,), _is_filtered, Verdict.REFUSE),
    ((401, 403, 404), _is_of_a_provider, Verdict.RETRY),
    ((400, 403, 409, 412, 422), _is_about_the_account, Verdict.STOP_ACCOUNT),
    ((401,), _is_refused_key, Verdict.STOP_ACCOUNT),
    # The endpoint took the request, and something behind it failed.
    ((401, 403, 404), _is_inside_a_later_reply, Verdict.RETRY),
    ((401, 402), _always, Verdict.STOP_ACCOUNT),
    # The key is good: it is this prompt that a filter or a firewall on the way does not let through.
    ((403,), _was_good_before, Verdict.REFUSE),
    ((403,), _always, Verdict.STOP_ACCOUNT),
    ((404, 405), _always, Verdict.STOP_MODEL),
    ((413,), _always, Verdict.CONTEXT),
    ((400, 422), _too_large, Verdict.CONTEXT),
    ((400, 422), _is_filtered, Verdict.REFUSE),
    ((400, 422), _no_model, Verdict.STOP_MODEL),
    ((400, 422), lacks_tools, Verdict.STOP_MODEL),
    ((400, 422), lambda failure: _takes_not_this_model(failure) and not failure.has_succeeded, Verdict.STOP_MODEL),
    ((408, 409, 425), _always, Verdict.RETRY),
    (tuple(range(500, 600)), _always, Verdict.RETRY),
)
"""The first row that fits decides; what fits none is a request that is wrong."""


def verdict_on(failure: HttpFailure) -> Verdict:
    """Look a failure up in the table."""
    for statuses, fits, verdict in TABLE:
        if failure.status in statuses and fits(failure):
            return verdict
    return Verdict.REJECT


STATUS_BY_NAME = {
    "overloaded_error": 529, "overloaded": 529, "rate_limit_error": 429, "rate_limit_exceeded": 429,
    "rate_limit_reached_error": 429, "too_many_requests": 429, "resource_exhausted": 429, "insufficient_quota": 429,
    "exceeded_current_quota_error": 429, "insufficient_credits": 402, "billing_error": 402, "invalid_api_key": 401,
    "authentication_error": 401, "unauthenticated": 401, "permission_error": 403, "permission_denied": 403,
    "model_not_found": 404, "not_found_error": 404, "request_too_large": 413, "context_length_exceeded": 400,
    "invalid_request_error": 400, "invalid_argument": 400, "content_filter": 400, "timeout_error": 408,
    "unavailable": 503, "api_error": 500, "server_error": 500,
}  # fmt: skip
"""What an error inside a 200 would have come with. Of OpenAI, Anthropic, Google and Moonshot."""


def reported_failure(error: object, **known: Any) -> HttpFailure:
    """An error that came with status 200, as one that came with its own; a provider that failed where it names none."""
    body = error if isinstance(error, Mapping) else {"message": str(error)}
    failure = HttpFailure(502, body, str(error), in_reply=True, **known)
    named = [failure.error.get(name) for name in ("code", "type", "status")]
    words = [str(name).lower() for name in named]
    numbers = [int(word) for word in words if re.fullmatch(r"[45][0-9][0-9]", word)]
    by_name = [STATUS_BY_NAME[word] for word in words if word in STATUS_BY_NAME]
    return replace(failure, status=[*numbers, *by_name, 502][0])


# ── how long it asks to wait ──────────────────────────────────────────────────────────────────────────────

_UNIT = r"(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?)(?![a-z])"
_SPOKEN_WAIT = re.compile(
    r"\b(?:try again|retry|wait)\s+(?:(?:in|after|for)\s+)?"
    rf"((?:\d{{1,9}}(?:\.\d{{1,9}})?\s*{_UNIT}(?:,|\s|and)*)+)",
    re.IGNORECASE,
)
_PART_OF_WAIT = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({_UNIT})", re.IGNORECASE)


def named_wait_s(failure: HttpFailure) -> float | None:
    """Seconds that an endpoint asks to wait: in a header, in Google's `RetryInfo`, or in its sentence."""
    in_headers = retry_after_s(failure.headers)
    if in_headers:
        return in_headers
    delays = [str(detail["retryDelay"]) for detail in failure.details if detail.get("retryDelay")]
    spoken = [match[1] for match in _SPOKEN_WAIT.finditer(failure.words)]
    return max((seconds for text in (*delays, *spoken) if (seconds := _spoken_s(text))), default=in_headers)


def _spoken_s(text: str) -> float:
    """`1m2.5s` or `2 minutes and 5 seconds` as seconds."""
    parts = ((float(number), unit.lower()) for number, unit in _PART_OF_WAIT.findall(text))
    return sum(number * _seconds_in(unit) for number, unit in parts)


def _seconds_in(unit: str) -> float:
    if unit.startswith(("ms", "milli")):
        return 0.001
    return {"s": 1.0, "m": 60.0, "h": 3600.0}[unit[0]]


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that an endpoint asks to wait: `retry-after-ms`, or `retry-after` as seconds or as an HTTP date.

    A date that has passed is 0; a number below 0 is as none.
    """
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        number = _number(headers.get(name, ""))
        if number is not None:
            return number / per_second if number >= 0 else None
    try:
        date = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((date - (now or datetime.now(UTC))).total_seconds(), 0.0)


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
