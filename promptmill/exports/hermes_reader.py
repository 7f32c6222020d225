"""Hermes text back to messages: what the export wrote, to the letter, but for the spacing of a call's arguments."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promptmill.exports.hermes import EXAMPLE, respaced, unescaped_text
from promptmill.records import Message, ToolCall

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_THINK = re.compile(r"<think>\n(?:(.*?)\n)?</think>", re.DOTALL)
_CALL = re.compile(rf'\n<tool_call>\n{{"name": ({_STRING}), "arguments": ([^\n]*)}}\n</tool_call>')
_RESULT = re.compile(
    rf'(?:\A|\n)<tool_response>\n{{"tool_call_id": ({_STRING}), "name": ({_STRING}), "content": ([^\n]*)}}'
    r"\n</tool_response>"
)


@dataclass(frozen=True, slots=True)
class HermesConversation:
    """What a conversation in Hermes text says."""

    tools: Sequence[Mapping[str, Any]]
    """The tools on offer, in alphabetical order: `name`, `description`, `parameters`."""
    messages: Sequence[Message]
    """From the run's own system prompt on, if there is one. A call has the id of its result; "" where it has none."""


def read_back(conversations: Sequence[Mapping[str, str]]) -> HermesConversation:
    """Read the turns that `hermes.export_row` wrote.

    Raises:
        ValueError: a turn is not of this format; the message says which.
    """
    listed, own_prompt = _read_system(conversations[0]["value"] if conversations else "")
    tools = [{key: tool[key] for key in ("name", "description", "parameters")} for tool in json.loads(listed)]
    messages = [Message("system", own_prompt)] if own_prompt else []
    for number, turn in enumerate(conversations[1:], start=1):
        match turn["from"]:
            case "gpt":
                messages.append(_read_gpt(turn["value"], number))
            case "tool":
                results = list(_read_results(turn["value"], number))
                _give_ids(messages[-1] if messages else None, results)
                messages += results
            case "human" | "system":
                messages.append(Message("user" if turn["from"] == "human" else "system", turn["value"]))
            case role:
                raise ValueError(f"turn {number}: no turn of this format is from {role!r}")
    return HermesConversation(tools, messages)


def _read_system(value: str) -> tuple[str, str]:
    """The tools as JSON, and the run's own prompt. Raises ValueError."""
    _, opening, rest = value.partition("<tools>\n")
    listed, closing, rest = rest.partition("\n</tools>\n")
    _, example, own_prompt = rest.partition(EXAMPLE)
    is_whole = bool(opening and closing and example) and "\n" not in listed
    if not is_whole or (own_prompt and not own_prompt.startswith("\n\n")):
        raise ValueError("turn 0: not the system turn of this format")
    return listed, own_prompt.removeprefix("\n\n")


def _read_gpt(value: str, number: int) -> Message:
    think = _THINK.match(value)
    if think is None:
        raise ValueError(f"turn {number}: no <think> block in front")
    first_call = value.find("\n<tool_call>\n", think.end())
    end = len(value) if first_call < 0 else first_call
    calls = _whole_matches(_CALL, value[end:], number)
    text = value[think.end() : end]
    if text and not text.startswith("\n"):
        raise ValueError(f"turn {number}: no line break after the <think> block")
    return Message(
        role="assistant",
        content=unescaped_text(text[1:]),
        reasoning=unescaped_text(think[1] or ""),
        tool_calls=tuple(ToolCall("", json.loads(call[1]), respaced(call[2], ", ", ": ")) for call in calls),
    )


def _read_results(value: str, number: int) -> Iterator[Message]:
    for result in _whole_matches(_RESULT, value, number):
        encoded = result[3]
        content = json.loads(encoded) if encoded.startswith('"') else respaced(encoded, ",", ":")
        yield Message("tool", content, tool_call_id=json.loads(result[1]), name=json.loads(result[2]))


def _whole_matches(pattern: re.Pattern[str], text: str, number: int) -> list[re.Match[str]]:
    """The blocks that a text consists of, one after another."""
    blocks = list(pattern.finditer(text))
    if sum(len(block[0]) for block in blocks) != len(text):
        raise ValueError(f"turn {number}: something that is no block of this format at {text[:100]!r}")
    return blocks


def _give_ids(caller: Message | None, results: Sequence[Message]) -> None:
    """Give calls the ids of their results. Both are in the same order; a call without a result is passed over."""
    if caller is None:
        return
    calls = list(caller.tool_calls)
    position = 0
    for result in results:
        while position < len(calls) and calls[position].name != result.name:
            position += 1
        if position < len(calls):
            calls[position] = ToolCall(result.tool_call_id, calls[position].name, calls[position].arguments)
            position += 1
    caller.tool_calls = tuple(calls)
