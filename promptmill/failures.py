"""What a failed request means: one table, by status and by body, and how long to wait before the next attempt.

Sources: https://openrouter.ai/docs/api-reference/errors, https://platform.openai.com/docs/guides/error-codes,
RFC 9110 section 10.2.3 (Retry-After).
"""

import email.utils
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from promptmill.errors import (
    ContextFullError,
    EndpointError,
    ModelError,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)

MAX_SHOWN_CHARS = 500


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
    """An answer with an error status."""

    status: int
    body: object = None
    """Decoded, or its `error` object; None when it is no JSON."""
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The provider's own name for the error, in lower case."""
        error = self.error
        return str(error.get("code") or error.get("type") or "").lower()

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object; empty when the answer has none."""
        body = self.body if isinstance(self.body, Mapping) else {}
        inner = body.get("error")
        return inner if isinstance(inner, Mapping) else body

    @property
    def said(self) -> str:
        """What the endpoint said, in one bounded line."""
        message = self.error.get("message")
        return " ".join(str(message or self.text).split())[:MAX_SHOWN_CHARS]


def _says(*patterns: str) -> Callable[[HttpFailure], bool]:
    pattern = re.compile("|".join(patterns), re.IGNORECASE)
    return lambda failure: bool(pattern.search(failure.said) or pattern.search(failure.code))


def _was_flagged(failure: HttpFailure) -> bool:
    metadata = failure.error.get("metadata")
    return isinstance(metadata, Mapping) and not metadata.keys().isdisjoint({"reasons", "flagged_input"})


_too_large = _says(
    "context.{0,3}length", "context window", "context size", "maximum context", "too many tokens", "prompt is too long"
)
_no_model = _says(
    "model_not_found", "not a valid model", r"model.{0,80}(not found|does not exist|not supported|is not available)"
)
_no_tools = _says("enable-auto-tool-choice", "support tool use", "does not support tools")
_is_quota = _says("insufficient_quota", "insufficient.{0,10}(credit|balance|fund)", "exceeded your current quota")
_is_per_minute = _says("per.?minute", "per.?second", "per.?hour", r"\brpm\b", r"\btpm\b", "try again in", "slow down")
_is_filtered = _says("content.?filter", "content.?policy", "content management policy", "moderation", "safety system")


def _always(failure: HttpFailure) -> bool:
    del failure
    return True


TABLE: tuple[tuple[tuple[int, ...], Callable[[HttpFailure], bool], Verdict], ...] = (
    # A limit by the minute that words itself as a quota is waited out; an exhausted quota is not.
    ((429,), lambda failure: _is_quota(failure) and not _is_per_minute(failure), Verdict.STOP_ACCOUNT),
    ((429, 529), _always, Verdict.WAIT),
    ((503,), lambda failure: retry_after_s(failure.headers) is not None, Verdict.WAIT),
    ((401, 402), _always, Verdict.STOP_ACCOUNT),
    ((403,), _was_flagged, Verdict.REFUSE),
    ((403,), _is_filtered, Verdict.REFUSE),
    ((403,), _always, Verdict.STOP_ACCOUNT),
    ((404, 405), _always, Verdict.STOP_MODEL),
    ((413,), _always, Verdict.CONTEXT),
    ((400, 422), _too_large, Verdict.CONTEXT),
    ((400, 422), _is_filtered, Verdict.REFUSE),
    ((400, 422), _no_model, Verdict.STOP_MODEL),
    ((400, 422), _no_tools, Verdict.STOP_MODEL),
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


class AttemptError(Exception):
    """This attempt failed in a way that may pass."""

    def __init__(
        self, message: str, *, final: type[ModelError] = TransientModelError, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.final = final
        """What is raised when no attempt is left."""
        self.retry_after_s = retry_after_s
        """What the endpoint asked for; None when it named no time."""
        self.was_refused = False
        """Whether the endpoint was asked for too much at once."""
        self.is_unreachable = False
        """Whether nothing took the connection: no such host, or nobody listens there."""


def http_error(failure: HttpFailure, base_url: str, model: str) -> Exception:
    """The exception for a failed request: an AttemptError when it may pass, else what ends the sample or the run."""
    where = f"{base_url} answered {failure.status}: {failure.said}"
    verdict = verdict_on(failure)
    if verdict in (Verdict.WAIT, Verdict.RETRY):
        error = AttemptError(where, retry_after_s=retry_after_s(failure.headers))
        error.was_refused = verdict is Verdict.WAIT
        return error
    match verdict:
        case Verdict.STOP_ACCOUNT:
            return EndpointError(f"{where}; check the key and the account, then --resume")
        case Verdict.STOP_MODEL:
            return EndpointError(f"{where}; check --model={model} and --base_url, then --resume")
        case Verdict.REFUSE:
            return RefusedError(where)
        case Verdict.CONTEXT:
            return ContextFullError(where)
    return RejectedRequestError(where)


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that an endpoint asks to wait: `retry-after-ms`, or `retry-after` as seconds or as an HTTP date."""
    in_ms = _number(headers.get("retry-after-ms", ""))
    if in_ms is not None:
        return max(in_ms / 1000, 0.0)
    value = headers.get("retry-after", "")
    seconds = _number(value)
    if seconds is not None:
        return max(seconds, 0.0)
    try:
        date = email.utils.parsedate_to_datetime(value)
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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is tried, and how long it waits in between."""

    max_attempts: int = 4
    max_refusals: int = 60
    """Attempts that the endpoint refused for want of room are counted apart: they cost it nothing."""
    max_refusal_backoff_s: float = 4.0
    """Short, since the limiter already keeps the others back; where an endpoint names a time, that is kept."""
    first_backoff_s: float = 1.0
    """Doubled for each further attempt; half of each wait is drawn at random so that workers do not retry in step."""
    max_backoff_s: float = 60.0
    max_retry_after_s: float = 600.0
    """A server's Retry-After beyond this is cut to it."""

    def backoff_s(self, attempt: int, rng: random.Random, *, was_refused: bool = False) -> float:
        """Wait after a failed attempt (from 1) for which the server named no time."""
        most_s = min(self.max_refusal_backoff_s, self.max_backoff_s) if was_refused else self.max_backoff_s
        ceiling = min(self.first_backoff_s * 2.0 ** min(attempt - 1, 30), most_s)
        return ceiling / 2 + rng.uniform(0, ceiling / 2)


@dataclass(slots=True)
class Patience:
    """The attempts of one call."""

    policy: RetryPolicy
    rng: random.Random
    attempts: int = 0
    refusals: int = 0

    def is_last(self, error: AttemptError) -> bool:
        """Whether no attempt is left after this one, which `wait_s` has not counted yet."""
        return not error.was_refused and self.attempts + 1 >= self.policy.max_attempts

    def wait_s(self, error: AttemptError) -> float:
        """How long to wait before the next attempt. Raises the error's final form when none is left."""
        if error.was_refused:
            self.refusals += 1
            count, most = self.refusals, self.policy.max_refusals
        else:
            self.attempts += 1
            count, most = self.attempts, self.policy.max_attempts
        if count >= most:
            raise error.final(f"{error} (after {self.attempts + self.refusals} attempts)") from error
        if error.retry_after_s is None:
            return self.policy.backoff_s(count, self.rng, was_refused=error.was_refused)
        return min(error.retry_after_s, self.policy.max_retry_after_s)
