"""What can go wrong, and what each outcome of a sample means.

The tree
    PromptmillError
    ├── UsageError             the command is wrong; nothing was started (exit 2)
    │   ├── ConfigError        a flag, a configuration file, a key
    │   └── DatasetError       the dataset cannot be read, or holds no sample
    ├── RunStoppedError        the run cannot go on; what is finished is on disk, `--resume` goes on (exit 1)
    │   ├── StorageError       the disk refused
    │   ├── LimitReachedError  a limit of the run's own: money, tokens, time, failures
    │   ├── EndpointError      nothing answers there, or it refuses the key, the account or the model
    │   └── EngineError        workers cannot be kept alive
    └── ModelError             one model call failed for good; ends its sample
        ├── TransientModelError    provider or network, past all retries
        ├── RefusedError           the model would not answer, or answered nothing
        ├── ContextFullError       the conversation no longer fits
        └── RejectedRequestError   the endpoint says that this request is wrong
"""

from dataclasses import dataclass
from enum import StrEnum

THEN_AGAIN = "then start again (a run: with --resume)"
"""How advice ends in messages that a run shows as well as a single agent, which has no `--resume`."""


class PromptmillError(Exception):
    """Root of everything raised on purpose. The message says what happened, where, and what to do next."""


class UsageError(PromptmillError):
    """The command is wrong, and nothing was started."""


class ConfigError(UsageError):
    """A flag, a configuration file or a key."""


class DatasetError(UsageError):
    """The dataset cannot be read, or holds no sample."""


class RunStoppedError(PromptmillError):
    """The run cannot go on. What is finished is on disk."""


class StorageError(RunStoppedError):
    """The disk refused a read or a write."""


class EndpointError(RunStoppedError):
    """Nothing answers there, or the key, the account or the model is refused: every further call would fail too."""


class LimitReachedError(RunStoppedError):
    """A limit that the user set keeps the rest from starting."""


class EngineError(RunStoppedError):
    """Workers cannot be started or kept alive."""


class ModelError(PromptmillError):
    """One model call failed for good."""

    def __init__(self, message: str, written: str = "") -> None:
        super().__init__(message)
        self.written = written
        """What the model wrote all the same: paid for, and no turn of the conversation."""


class TransientModelError(ModelError):
    """Provider or network, past all retries."""


class RefusedError(ModelError):
    """A content filter, or neither text nor call after the retries."""


class ContextFullError(ModelError):
    """The conversation no longer fits the model's context."""


class RejectedRequestError(ModelError):
    """The endpoint says that this request is wrong; sending it again would change nothing."""


class Outcome(StrEnum):
    """How a sample ended."""

    __hash__ = str.__hash__  # that of an enumeration is written in Python, and every row of every scan asks for it

    COMPLETED = "completed"
    PARTIAL = "partial"
    DISCARDED = "discarded"
    REFUSED = "refused"
    FAILED_TRANSIENT = "failed_transient"
    FAILED_PERMANENT = "failed_permanent"
    INTERRUPTED = "interrupted"
    """Broken off after it had called the model: what it cost is kept, and its sample is pending."""


class Destination(StrEnum):
    """Which file of the run folder takes a sample's row."""

    SHARD = "shard"
    DISCARDED = "discarded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OutcomePolicy:
    """What an outcome means for files and resume."""

    destination: Destination
    done: bool
    """Whether a resume leaves the sample alone."""
    is_failure: bool = False
    """Whether the sample has ended without a row to train on."""


OUTCOME_POLICY = {
    Outcome.COMPLETED: OutcomePolicy(Destination.SHARD, done=True),
    Outcome.PARTIAL: OutcomePolicy(Destination.SHARD, done=True),
    Outcome.DISCARDED: OutcomePolicy(Destination.DISCARDED, done=True),
    Outcome.REFUSED: OutcomePolicy(Destination.FAILED, done=False, is_failure=True),
    Outcome.FAILED_TRANSIENT: OutcomePolicy(Destination.FAILED, done=False, is_failure=True),
    Outcome.FAILED_PERMANENT: OutcomePolicy(Destination.FAILED, done=False, is_failure=True),
    Outcome.INTERRUPTED: OutcomePolicy(Destination.FAILED, done=False),
}
"""The one table that decides; a row filtered at the merge stays in its shard, so filtering is no outcome here."""
