"""Every record that crosses a file boundary of the house."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from promptmill.errors import Outcome


@dataclass(frozen=True, slots=True)
class Sample:
    """One valid row of the dataset."""

    index: int
    """Position among the valid rows of the dataset, from 0."""
    prompt: str
    content_hash: str
    """32 hex digits over the whole dataset row: the sample's identity, wherever it stands in the file."""
    occurrence: int = 0
    """How many samples with the same content come before it; tells repeated rows apart."""
    image: str = ""
    cwd: str = ""
    extra_json: str = "{}"
    """The row's further columns, as JSON text."""
    attempt: int = 1
    """How often it is tried with this one, over all starts of the run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that one worker runs one after another; `number` names their shard."""

    number: int
    samples: tuple[Sample, ...]


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Tokens as the endpoint reported them, and what they cost. Never changed, only added up.

    Not frozen: every row of every scan makes one, and a frozen one takes four times as long to make.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    reported_calls: int = 0
    """How many calls reported tokens."""
    cost_usd: float = 0.0
    priced_calls: int = 0
    """How many calls are in `cost_usd`; the cost of the others is unknown."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reported_calls + other.reported_calls,
            self.cost_usd + other.cost_usd,
            self.priced_calls + other.priced_calls,
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asked for."""

    id: str
    name: str
    arguments: str
    """As the model wrote it; not always valid JSON."""
    written: str = ""
    """The name as the model wrote it, where it was mended; with `text:` in front for a call written as text."""

    @property
    def json_arguments(self) -> str:
        """Arguments that are valid JSON: as the model wrote them where they are, else wrapped and whole."""
        try:
            is_object = isinstance(orjson.loads(self.arguments), dict)
        except orjson.JSONDecodeError:
            is_object = False
        return self.arguments if is_object else orjson.dumps({"invalid_arguments": self.arguments}).decode()

    def as_openai(self) -> dict[str, Any]:
        """The call in OpenAI's shape, as it is sent and as it is saved."""
        function = {"name": self.name, "arguments": self.json_arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a reply that its endpoint wants back unchanged on later turns."""
    encoded: bytes = field(default=b"", compare=False, repr=False)
    """The client's own: this message as sent, so that a growing conversation is encoded once."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What one model call gave."""

    message: Message
    finish_reason: str
    usage: Usage
    cut: bool = False
    """Whether the token limit ended it; its last call may then be incomplete and must not be executed."""
    refusal: str = ""
    """What the model said instead of an answer, where it refused to give one."""
    reasoning_field: str = ""
    """The message's field that reasoning came in; empty where it came in another way."""


@dataclass(slots=True)
class ToolTally:
    """How often one tool was called, by the executor's own knowledge."""

    success: int = 0
    failure: int = 0

    @property
    def count(self) -> int:
        return self.success + self.failure


@dataclass(slots=True)
class AgentResult:
    """One conversation and what is known about it."""

    outcome: Outcome
    stop_reason: str
    """Why it ended: `answer`, `max_turns`, `output_cut`, `context_full`, … or the class of the failure."""
    messages: list[Message]
    """From the system message on; without the ephemeral system prompt and the prefill messages."""
    api_calls: int = 0
    usage: Usage = Usage()
    tool_tallies: dict[str, ToolTally] = field(default_factory=dict)
    """By name, unknown names included."""
    toolsets: tuple[str, ...] = ()
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    unknown_tools: tuple[str, ...] = ()
    """Names the model called that no tool of the run has."""
    repaired_tools: tuple[str, ...] = ()
    """Names the model wrote otherwise and the tools they were taken for, each once: `Terminal→terminal`."""
    error: str = ""
    duration_s: float = 0.0

    @property
    def final_response(self) -> str:
        """The last answer's text; empty when the conversation ended without one."""
        last = self.messages[-1] if self.messages else None
        return last.content if last is not None and last.role == "assistant" and not last.tool_calls else ""


@dataclass(slots=True)
class RowSummary:
    """What statistics, progress and resume need of a row; made from the row alone, so a scan gives the same."""

    content_hash: str
    occurrence: int
    prompt: str
    image: str
    cwd: str
    batch_number: int
    outcome: Outcome
    stop_reason: str
    assistant_turns: int
    reasoning_turns: int
    api_calls: int
    tallies: Mapping[str, tuple[int, int]]
    """Tool name -> (successes, failures), used tools only."""
    unknown_tools: tuple[str, ...]
    toolsets: tuple[str, ...]
    usage: Usage
    timestamp: str
    error: str = ""
    duration_s: float = 0.0
    attempt: int = 1
    is_ours: bool = False
    """Whether the row has just our keys, each of its type."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a worker hands to the runner when a sample has ended."""

    batch_number: int
    index: int
    row: bytes
    """The row, encoded, without the newline."""
    summary: RowSummary
    has_next: bool = False
    """Whether its batch has a sample after it, which waits to be let start."""


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One line of `--verbose`: what happened in a sample's conversation."""

    index: int
    text: str
    """Untrusted; escaped where it is shown."""


class WorkerEvents(Protocol):
    """Where a worker's work goes."""

    async def sample_finished(self, result: SampleResult) -> bool:
        """A sample has ended, or was broken off (its outcome says so).

        Returns when its row is on disk, and whether its batch's next sample may start.
        """

    async def batch_finished(self, number: int) -> None:
        """All samples of a batch have ended."""

    def turn(self, event: TurnEvent) -> None:
        """Something happened in a conversation; called only when the run is verbose."""


class RunEvents(WorkerEvents, Protocol):
    """Where an engine's news goes."""

    def may_start(self, batch_number: int) -> bool:
        """Whether a batch's first sample may start; asked just before a worker gets the batch. Once no, always no."""

    def note(self, line: str) -> None:
        """Something that whoever watches the run should know."""

    def limit_changed(self, limit: int, refusals: int, said: str) -> None:
        """The endpoint refused, or takes more: the limit now, and the refusals so far."""
