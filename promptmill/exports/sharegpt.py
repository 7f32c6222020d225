"""The default format: what a finished sample's row looks like in the shards and in `trajectories.jsonl`.

Turns are `{"from": "system"|"human"|"gpt"|"tool", "value": text}`. A gpt turn that calls tools also has `tool_calls`
(OpenAI's shape); a tool turn has `tool_call_id` and `name`, one turn per result, in call order. Reasoning is one
leading `<think>` block of the gpt value, wherever the model's endpoint put it. A think tag that a model speaks of, in
its reasoning or in its answer, is written `&lt;think>`, so that every gpt value has one block at most, opened and
closed once, and `split_think` gives back what was thought and said.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import orjson

from promptmill.errors import Outcome
from promptmill.records import AgentResult, Message, Sample
from promptmill.rows import normalised_tool_columns

ROLE_NAMES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}

_OWN_THINK = re.compile(r"<think>\n(?:(.*?)\n)?</think>(?:\n|\Z)", re.DOTALL)
_ANY_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)

_TAG = r"/?think>"
_TO_ESCAPE = re.compile(rf"<(?={_TAG})|&(?=(?:amp;)*lt;{_TAG})", re.IGNORECASE)
_ESCAPED = re.compile(rf"&(?:lt;(?={_TAG})|amp;(?=(?:amp;)*lt;{_TAG}))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a row says beyond its sample and its conversation."""

    batch_number: int
    model: str
    seed: int
    tool_names: Sequence[str]
    """Every tool that has a column in `tool_stats`, in order."""
    now: datetime
    """Naive local time, as the followed product writes it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The options that shaped the conversation, where they were given."""


def build_row(result: AgentResult, sample: Sample, facts: RowFacts) -> dict[str, Any]:
    """The row, JSON-ready, keys in the order of `rows.DOCUMENTED_KEYS` and `rows.OWN_DEFAULTS`."""
    tallies = {
        name: {"count": tally.count, "success": tally.success, "failure": tally.failure}
        for name, tally in result.tool_tallies.items()
    }
    stats, errors = normalised_tool_columns({"tool_stats": tallies}, facts.tool_names)
    answers = [message for message in result.messages if message.role == "assistant"]
    return {
        "prompt_index": sample.index,
        "conversations": [turn(message) for message in result.messages],
        "metadata": {
            "batch_num": facts.batch_number,
            "timestamp": facts.now.isoformat(timespec="microseconds"),
            "model": facts.model,
        },
        "completed": result.outcome is Outcome.COMPLETED,
        "partial": result.outcome is Outcome.PARTIAL,
        "api_calls": result.api_calls,
        "toolsets_used": list(result.toolsets),
        "tool_stats": stats,
        "tool_error_counts": errors,
        "outcome": str(result.outcome),
        "stop_reason": result.stop_reason,
        # Part of it may be an endpoint's words, in which a character can be cut in half.
        "error": result.error.encode("utf-8", "replace").decode(),
        "content_hash": sample.content_hash,
        "occurrence": sample.occurrence,
        "attempt": sample.attempt,
        "image": sample.image,
        "cwd": sample.cwd,
        "extra": sample.extra_json,
        "tools": orjson.dumps(result.tool_schemas).decode(),
        "unknown_tools": list(result.unknown_tools),
        "repaired_tools": list(result.repaired_tools),
        "usage": asdict(result.usage),
        "assistant_turns": len(answers),
        "reasoning_turns": sum(bool(message.reasoning) for message in answers),
        "duration_s": float(round(result.duration_s, 6)),
        "seed": facts.seed,
        "settings": orjson.dumps(facts.settings).decode(),
    }


def turn(message: Message) -> dict[str, Any]:
    """One message as a turn."""
    value = escaped_tags(message.content) if message.role == "assistant" else message.content
    if message.reasoning:
        value = f"<think>\n{escaped_tags(message.reasoning)}\n</think>\n{value}"
    saved: dict[str, Any] = {"from": ROLE_NAMES[message.role], "value": value}
    if message.tool_calls:
        saved["tool_calls"] = [call.as_openai() for call in message.tool_calls]
    if message.role == "tool":
        saved |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return saved


def split_think(value: str) -> tuple[str, str]:
    """Reasoning and text of a gpt value: those that `turn` put together, or as other programs write the block."""
    match = _OWN_THINK.match(value) or _ANY_THINK.match(value)
    reasoning, text = (match[1] or "", value[match.end() :]) if match else ("", value)
    return unescaped_tags(reasoning), unescaped_tags(text)


def escaped_tags(text: str) -> str:
    """Text that neither opens nor ends a block: the `<` of a think tag in it becomes `&lt;`, and no more is touched."""
    return _TO_ESCAPE.sub(lambda match: "&lt;" if match[0] == "<" else "&amp;", text)


def unescaped_tags(text: str) -> str:
    """The text that `escaped_tags` was given."""
    return _ESCAPED.sub(lambda match: "<" if match[0].lower() == "&lt;" else "&", text)


def export_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as it is."""
    return dict(row)
