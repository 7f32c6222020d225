"""What a failed request ends in, and how long to wait before the next attempt. What it means is in `verdicts`."""

import random
from dataclasses import dataclass

from promptmill.endpoints import NO_KEY, Endpoint, key_variable
from promptmill.errors import (
    THEN_AGAIN,
    ContextFullError,
    EndpointError,
    ModelError,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)
from promptmill.verdicts import HttpFailure, Verdict, lacks_provider, lacks_tools, named_wait_s, verdict_on
from promptmill.wording import counted


class AttemptError(Exception):
    """This attempt failed in a way that may pass."""

    def __init__(
        self,
        message: str,
        *,
        final: type[ModelError] = TransientModelError,
        retry_after_s: float | None = None,
        written: str = "",
    ) -> None:
        super().__init__(message)
        self.final = final
        """What is raised when no attempt is left."""
        self.retry_after_s = retry_after_s
        """What the endpoint asked for; None when it named no time."""
        self.written = written
        """What the model wrote all the same."""
        self.was_refused = False
        """Whether the endpoint was asked for too much at once."""
        self.is_unreachable = False
        """Whether nothing took the connection: no such host, or nobody listens there."""


def http_error(failure: HttpFailure, endpoint: Endpoint, model: str) -> Exception:
    """The exception for a failed request: an AttemptError when it may pass, else what ends the sample or the run."""
    called = failure.url if failure.url and failure.status in (404, 405) else endpoint.base_url
    status = "200 with an error" if failure.in_reply else failure.status
    where = f"{called} answered {status}: {failure.said}"
    verdict = verdict_on(failure)
    if verdict in (Verdict.WAIT, Verdict.RETRY):
        error = AttemptError(where, retry_after_s=named_wait_s(failure))
        error.was_refused = verdict is Verdict.WAIT
        return error
    match verdict:
        case Verdict.STOP_ACCOUNT:
            return EndpointError(f"{where}; {_account_advice(failure, endpoint)}, {THEN_AGAIN}")
        case Verdict.STOP_MODEL:
            return EndpointError(f"{where}; {_model_advice(failure, model)}, {THEN_AGAIN}")
        case Verdict.REFUSE:
            return RefusedError(where)
        case Verdict.CONTEXT:
            return ContextFullError(where)
    return RejectedRequestError(where)


def _account_advice(failure: HttpFailure, endpoint: Endpoint) -> str:
    if endpoint.api_key == NO_KEY and failure.status in (401, 403) and not failure.has_succeeded:
        return f"no key was sent: set {key_variable(endpoint.host)} in the environment, or give --api_key"
    return "check the key and the account"


def _model_advice(failure: HttpFailure, model: str) -> str:
    if lacks_provider(failure):
        return "check --providers_allowed, --providers_ignored and --providers_order"
    if lacks_tools(failure):
        return f"{model} takes no tools here: choose another model, or have its server take them"
    return f"check --model={model} and --base_url"


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
    max_outage_s: float = 300.0
    """How long an endpoint that has answered before may be unreachable; nothing is received and paid meanwhile."""
    max_outage_backoff_s: float = 5.0

    def backoff_s(self, attempt: int, rng: random.Random, *, was_refused: bool = False) -> float:
        """The least wait after a failed attempt (from 1)."""
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
    outages: int = 0

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
            raise self.given_up(error)
        # An endpoint that says "at once", or has a clock that is wrong, would be asked without a pause.
        least_s = self.policy.backoff_s(count, self.rng, was_refused=error.was_refused)
        return max(least_s, min(error.retry_after_s or 0.0, self.policy.max_retry_after_s))

    def outage_wait_s(self) -> float:
        """How long to wait before an endpoint that cannot be reached is tried again; costs no attempt."""
        self.outages += 1
        return min(self.policy.backoff_s(self.outages, self.rng), self.policy.max_outage_backoff_s)

    def given_up(self, error: AttemptError, why: str = "") -> ModelError:
        """The error's final form."""
        said = error.final(f"{error} (after {counted(self.attempts + self.refusals, 'attempt')}{why})", error.written)
        said.__cause__ = error
        return said
