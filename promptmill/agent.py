"""The agent: model call, tool calls, results back, until an answer or the last allowed turn.

An agent never raises for what a model, a provider or a tool did: that is in its result. It raises only what must stop
the run (`RunStoppedError`).
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from promptmill.config import AgentSettings
from promptmill.deadlines import PromptClock
from promptmill.errors import (
    ContextFullError,
    ModelError,
    Outcome,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)
from promptmill.records import AgentResult, Message, ModelReply, ToolCall, ToolTally, Usage
from promptmill.wording import counted
from toolsets.base import Tool, ToolContext
from toolsets.execute import ToolOutcome, execute_call
from toolsets.sandboxes.base import SandboxError

MAX_CALLS_PER_TURN = 1000
"""A model that asks for more at once has lost its way; none of them is executed."""

MAX_INVALID_TURNS = 3
"""Turns in a row in which every call named no tool or broke its schema: the model will not find the way any more."""

NOT_EXECUTED = {
    "prompt_timeout": "the prompt's time was spent",
    "output_cut": "the reply was cut at its token limit, and may not be whole",
    "too_many_calls": "these are too many calls at once",
    "sandbox_failed": "the sandbox failed",
}
"""Stop reason -> why a call has no result."""


class CompletesConversations(Protocol):
    """What an agent needs of a model client."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], clock: PromptClock
    ) -> ModelReply:
        """One model call; raises ModelError or RunStoppedError."""


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of one sample."""

    toolsets: tuple[str, ...]
    tools: Mapping[str, Tool]
    """By name, in the order in which they are offered."""
    run_tools: Collection[str]
    """Every tool name that some sample of the run may be offered; any other name does not exist."""


class Agent:
    """One conversation. Made fresh for each sample."""

    def __init__(
        self,
        client: CompletesConversations,
        settings: AgentSettings,
        offer: ToolOffer,
        context: ToolContext,
        observe: Callable[[str], None] = lambda _line: None,
        price: Callable[[Usage], Usage] = lambda usage: usage,
    ) -> None:
        self.client = client
        self.settings = settings
        self.offer = offer
        self.context = context
        self.observe = observe
        self.price = price
        self.schemas = tuple(tool.schema() for tool in offer.tools.values())
        self.result: AgentResult | None = None
        """What there is of the conversation so far, for whoever breaks it off; None before `run`."""
        self.clock: PromptClock | None = None
        """The prompt's own time; None before `run`."""

    async def run(self, prompt: str) -> AgentResult:
        """Hold the conversation that a prompt opens.

        Raises:
            RunStoppedError: no conversation of this run can go on.
        """
        started_s = time.monotonic()
        most = self.settings.max_turns
        result = AgentResult(
            outcome=Outcome.PARTIAL,
            stop_reason="max_turns",
            error=f"no answer within {counted(most, 'model call')} (--max_turns)",
            messages=opening_messages(self.settings, prompt),
            toolsets=self.offer.toolsets,
            tool_schemas=self.schemas,
        )
        self.result = result
        self.observe(f"asks    {prompt}")
        clock = self.clock = PromptClock(self.settings.prompt_timeout_s)
        try:
            async with clock:
                await self._converse(result, clock)
        except TimeoutError:
            if not clock.is_spent:
                raise
            record_timeout(result, self.settings.prompt_timeout_s)
        except (ModelError, SandboxError) as exc:
            record_failure(result, exc)
        finally:
            answer_open_calls(result)
            result.usage += self.price(clock.unanswered)
            result.duration_s = time.monotonic() - started_s
        self.observe(f"ends    {result.stop_reason} {result.error}".rstrip())
        return result

    async def _converse(self, result: AgentResult, clock: PromptClock) -> None:
        unsaved = self._unsaved_opening(result.messages)
        prompt_place = len(result.messages) - 1
        invalid_turns = 0
        while result.api_calls < self.settings.max_turns:
            reply = await self.client.complete([*unsaved, *result.messages[prompt_place:]], self.schemas, clock)
            result.api_calls += 1
            result.usage += self.price(reply.usage)
            result.messages.append(reply.message)
            self._observe_reply(reply)
            if reply.cut:
                result.stop_reason, result.error = "output_cut", "the reply was cut at its token limit (--max_tokens)"
                return
            if not reply.message.tool_calls:
                result.outcome, result.stop_reason, result.error = Outcome.COMPLETED, "answer", ""
                return
            if (asked := len(reply.message.tool_calls)) > MAX_CALLS_PER_TURN:
                result.stop_reason = "too_many_calls"
                result.error = (
                    f"the model asked for {asked:,} calls at once; none of more than {MAX_CALLS_PER_TURN:,} is executed"
                )
                return
            were_valid = [await self._answer(call, result) for call in reply.message.tool_calls]
            invalid_turns = 0 if any(were_valid) else invalid_turns + 1
            if invalid_turns >= MAX_INVALID_TURNS:
                result.stop_reason = "no_valid_call"
                result.error = f"no call of {MAX_INVALID_TURNS} turns in a row named a tool and fitted its schema"
                return
            if self._would_pass_limit(result.usage, reply.usage):
                result.stop_reason = "prompt_max_tokens"
                limit = self.settings.prompt_max_tokens
                result.error = f"another call would pass the prompt's limit of {limit:,} tokens (--prompt_max_tokens)"
                return

    def _would_pass_limit(self, spent: Usage, last: Usage) -> bool:
        """Whether a further call would bring the tokens above the limit: it has at least the last one's to read."""
        limit = self.settings.prompt_max_tokens
        return limit is not None and spent.total_tokens + last.total_tokens > limit

    def _unsaved_opening(self, messages: Sequence[Message]) -> list[Message]:
        """What every request begins with, up to the prompt: system, ephemeral system and prefill messages."""
        parts = [message.content for message in messages if message.role == "system"]
        parts += [self.settings.ephemeral_system_prompt] if self.settings.ephemeral_system_prompt else []
        system = [Message("system", "\n\n".join(parts))] if parts else []
        return [*system, *self.settings.prefill_messages]

    async def _answer(self, call: ToolCall, result: AgentResult) -> bool:
        """Execute one call and add its result to the conversation; returns whether a tool could take it."""
        outcome = await execute_call(self.offer.tools, self.context, call.name, call.arguments)
        tally = result.tool_tallies.setdefault(call.name, ToolTally())
        tally.success += not outcome.failed
        tally.failure += outcome.failed
        if call.written:
            repair = f"{call.written}→{call.name}"
            result.repaired_tools = tuple(dict.fromkeys((*result.repaired_tools, repair)))
        if call.name not in self.offer.tools and call.name not in self.offer.run_tools:
            result.unknown_tools = tuple(dict.fromkeys((*result.unknown_tools, call.name)))
        result.messages.append(Message("tool", outcome.content, tool_call_id=call.id, name=call.name))
        self._observe_outcome(call, outcome)
        return outcome.kind not in ("unknown_tool", "invalid_arguments")

    def _observe_reply(self, reply: ModelReply) -> None:
        if reply.message.reasoning:
            self.observe(f"thinks  {reply.message.reasoning}")
        if reply.message.content:
            self.observe(f"says    {reply.message.content}")

    def _observe_outcome(self, call: ToolCall, outcome: ToolOutcome) -> None:
        self.observe(f"calls   {call.name} {call.arguments}")
        self.observe(f"{'fails  ' if outcome.failed else 'gets   '} {outcome.content}")


def opening_messages(settings: AgentSettings, prompt: str) -> list[Message]:
    """The saved opening of a conversation: the system prompt, unless it is empty, and the prompt."""
    system = [Message("system", settings.system_prompt)] if settings.system_prompt else []
    return [*system, Message("user", prompt)]


def answer_open_calls(result: AgentResult) -> None:
    """Give each call of the last turn that has no result one that says so: trainers and chat templates want a pair.

    They are in no tally. A tally says how a tool fared, and no tool has answered here.
    """
    place = max((at for at, message in enumerate(result.messages) if message.tool_calls), default=0)
    answered = len(result.messages) - place - 1
    why = NOT_EXECUTED.get(result.stop_reason, "the conversation was ended")
    for number, call in enumerate(result.messages[place].tool_calls[answered:]):
        # The calls are executed one after another: what ended the prompt ended the first of these.
        was_begun = number == 0 and result.stop_reason in ("prompt_timeout", "sandbox_failed")
        error = f"{'not finished' if was_begun else 'not executed'}: {why}"
        content = orjson.dumps({"error": error}).decode()
        result.messages.append(Message("tool", content, tool_call_id=call.id, name=call.name))


def record_timeout(result: AgentResult, timeout_s: float) -> None:
    """Write into a result that the prompt's own time was spent: partial, or failed when nothing was answered yet."""
    result.stop_reason = "prompt_timeout"
    result.error = f"the prompt's time of {timeout_s:g} s was spent (--prompt_timeout_s)"
    result.outcome = Outcome.PARTIAL if result.api_calls else Outcome.FAILED_TRANSIENT


def record_failure(result: AgentResult, exc: ModelError | SandboxError) -> None:
    """Write into a result what ended it early, and what the model wrote in a reply that is no turn."""
    written = exc.written if isinstance(exc, ModelError) else ""
    result.error = f"{exc}; it had written: {written}" if written else str(exc)
    match exc:
        case ContextFullError() if result.api_calls:
            result.outcome, result.stop_reason = Outcome.PARTIAL, "context_full"
        case ContextFullError():
            result.outcome, result.stop_reason = Outcome.FAILED_PERMANENT, "prompt_too_large"
        case RefusedError():
            result.outcome, result.stop_reason = Outcome.REFUSED, "refused"
        case RejectedRequestError():
            result.outcome, result.stop_reason = Outcome.FAILED_PERMANENT, "rejected_request"
        case TransientModelError():
            result.outcome, result.stop_reason = Outcome.FAILED_TRANSIENT, "provider_failed"
        case SandboxError():
            result.outcome = Outcome.FAILED_PERMANENT if exc.permanent else Outcome.FAILED_TRANSIENT
            result.stop_reason = "sandbox_failed"
        case _:
            result.outcome, result.stop_reason = Outcome.FAILED_TRANSIENT, "failed"
