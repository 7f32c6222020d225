"""AIAgent: one conversation outside any batch, for scripts and for trying things."""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from promptmill.agent import Agent, ToolOffer
from promptmill.client import ModelClient
from promptmill.config import (
    agent_settings,
    environment,
    model_settings,
    options_from,
    prefill_from,
    reasoning_options,
)
from promptmill.errors import ConfigError, Outcome, RunStoppedError
from promptmill.exports.sharegpt import RowFacts, build_row
from promptmill.local_model import served
from promptmill.logs import masked_records
from promptmill.preflight import toolsets_notes
from promptmill.prices import Prices
from promptmill.quirks import quirks_for
from promptmill.records import AgentResult, Message, Sample, ToolCall
from promptmill.secrets import Mask, mask_of, secrets_in
from promptmill.shards import append_lines
from toolsets.base import ToolContext, ToolsetError
from toolsets.catalog import TOOLS, TOOLSETS, tools_in, unavailable
from toolsets.sandboxes import choose, new_sandbox
from toolsets.sandboxes.base import SandboxError, SandboxSpec

SUCCESSFUL = Path("trajectory_samples.jsonl")
FAILED = Path("failed_trajectories.jsonl")


class AIAgent:
    """An agent for single conversations. Each conversation gets a sandbox of its own.

    Secrets that the runner holds (see `secrets`) are `***` in what it returns, tells, raises and saves. Its `notes` are
    lines for a person: where tools run, which toolsets are left out, what the endpoint does otherwise than asked.

    Args:
        max_iterations: Most model calls of a conversation.
        enabled_toolsets: Toolsets to offer; None for all that can be used here.
        reasoning_config: `{"enabled": bool, "effort": str}`.
        prefill_messages: Messages sent after the system prompt on every request, never saved.
        save_trajectories: Append each conversation to `trajectory_samples.jsonl` in the current folder when it
            completed, else to `failed_trajectories.jsonl`.
        skip_context_files: Accepted for compatibility: no context files are ever read.
        skip_memory: Accepted for compatibility: there is no memory between conversations.
        observe: Told each step as a line of text, while it happens.
        **options: Flags of `batch_runner.py` that shape a conversation: `model`, `base_url`, `api_key`,
            `max_tokens`, `temperature`, `top_p`, `system_prompt`, `ephemeral_system_prompt`, `sandbox`, the provider
            and reasoning flags.

    Raises:
        ConfigError: an option is unknown or refused.
    """

    def __init__(
        self,
        *,
        max_iterations: int = 10,
        enabled_toolsets: Sequence[str] | None = None,
        reasoning_config: Mapping[str, Any] | None = None,
        prefill_messages: Iterable[Mapping[str, str]] | None = None,
        save_trajectories: bool = False,
        skip_context_files: bool = True,
        skip_memory: bool = True,
        observe: Callable[[str], None] = lambda _line: None,
        **options: Any,
    ) -> None:
        del skip_context_files, skip_memory
        given = {**options, **reasoning_options(reasoning_config), "max_turns": max_iterations}
        decided = options_from({name: value for name, value in given.items() if value is not None})
        self.model = model_settings(decided, environment())
        self.agent = agent_settings(decided)
        if prefill_messages:
            self.agent = replace(self.agent, prefill_messages=prefill_from(prefill_messages, "prefill_messages"))
        self.save_trajectories = save_trajectories
        self._mask = mask_of(secrets_in(environment(), self.model.endpoint.api_key))
        self.observe: Callable[[str], None] = lambda line: observe(self._mask.text(line))
        try:
            self.sandbox, sandbox_note = choose(decided["sandbox"])
            self._offer = _offer(enabled_toolsets)
        except (ValueError, SandboxError) as exc:
            raise ConfigError(str(exc)) from exc
        missing = unavailable(TOOLSETS) if enabled_toolsets is None else {}
        quirks_notes = (note for quirk in quirks_for(self.model) for note in quirk.notes())
        self.notes: tuple[str, ...] = (sandbox_note, *toolsets_notes(missing), *quirks_notes)

    async def run_conversation(self, prompt: str) -> AgentResult:
        """Hold one conversation, to its end; what went wrong in it is in the result.

        Raises:
            RunStoppedError: the endpoint refuses the key, the account or the model, or the disk refused the row.
            ConfigError: the embedded model cannot be served.
            SandboxError: the sandbox cannot be made.
        """
        try:
            with masked_records(self._mask):
                result = _masked(await self._converse(prompt), self._mask)
        except RunStoppedError as exc:
            if self._mask.text(trace := "".join(traceback.format_exception(exc))) == trace:
                raise
            raise type(exc)(self._mask.text(str(exc))) from None
        if self.save_trajectories:
            self._save(prompt, result)
        return result

    async def _converse(self, prompt: str) -> AgentResult:
        async with AsyncExitStack() as stack:
            serving = served(self.model, parallel=1, environ=environment(), note=self.observe)
            model = await stack.enter_async_context(serving)
            client = ModelClient(model, max_connections=1)
            stack.push_async_callback(client.close)
            sandbox = new_sandbox(self.sandbox, SandboxSpec(label="conversation"))
            stack.push_async_callback(sandbox.close)
            await sandbox.start()
            price = Prices(model).priced
            agent = Agent(client, self.agent, self._offer, ToolContext(sandbox), self.observe, price)
            return await agent.run(prompt)

    def _save(self, prompt: str, result: AgentResult) -> None:
        facts = RowFacts(0, self.model.model, 0, tuple(TOOLS), datetime.now())
        row = build_row(result, Sample(index=0, prompt=prompt, content_hash=""), facts)
        path = SUCCESSFUL if result.outcome is Outcome.COMPLETED else FAILED
        append_lines(Path.cwd() / path, [self._mask.json_bytes(orjson.dumps(row))])


def _masked(result: AgentResult, mask: Mask) -> AgentResult:
    """A result without secrets, wherever a model, a tool or an endpoint may have written one."""
    return replace(
        result,
        messages=[_masked_message(message, mask) for message in result.messages],
        tool_tallies={mask.text(name): tally for name, tally in result.tool_tallies.items()},
        unknown_tools=tuple(map(mask.text, result.unknown_tools)),
        repaired_tools=tuple(map(mask.text, result.repaired_tools)),
        error=mask.text(result.error),
    )


def _masked_message(message: Message, mask: Mask) -> Message:
    calls = [
        ToolCall(mask.text(call.id), mask.text(call.name), mask.value(call.arguments), mask.text(call.written))
        for call in message.tool_calls
    ]
    return replace(
        message,
        content=mask.value(message.content),
        reasoning=mask.text(message.reasoning),
        tool_calls=tuple(calls),
        tool_call_id=mask.text(message.tool_call_id),
        name=mask.text(message.name),
        echo=mask.value(message.echo),
        encoded=b"",  # as it was sent, secrets and all
    )


def _offer(toolsets: Sequence[str] | None) -> ToolOffer:
    """The tools of some toolsets, or of all that can be used here. Raises ToolsetError."""
    if toolsets is None:
        toolsets = [name for name in TOOLSETS if not TOOLSETS[name].missing]
    if missing := unavailable(toolsets):
        raise ToolsetError("; ".join(f"toolset {name!r} cannot be used: {why}" for name, why in missing.items()))
    tools = {tool.name: tool for tool in tools_in(toolsets)}
    return ToolOffer(tuple(toolsets), tools, frozenset(tools))
