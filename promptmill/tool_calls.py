"""Tool calls of a message: from whatever a model or a server wrote to calls that can be executed and answered.

Each has an id of its own in its conversation, a name that is an offered tool's where it can mean only that, and its
arguments as text, as the model wrote them.

A call that a model wrote as text is taken for a call only where tools were offered, it names one of them, and nothing
follows it: an answer may speak of calls. It stands in `<tool_call>` tags (Qwen, Hermes), or the JSON is the whole text
(small Llama models, servers without a tool parser).
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import orjson

from promptmill.records import ToolCall
from toolsets.names import matching_tool
from toolsets.text import clean_surrogates

AS_TEXT = "text:"
"""Before the name of a call that was written as text, in `ToolCall.written`."""

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FENCED = re.compile(r"```(?:json|tool_call)?\s*\n(.*)\n\s*```", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>|\Z)\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def native_calls(message: Mapping[str, Any], offered: Collection[str], used_ids: Collection[str]) -> list[ToolCall]:
    """The calls in `tool_calls`, or in the older `function_call`."""
    calls: list[ToolCall] = []
    for entry in call_entries(message):
        function = entry["function"]
        call_id = str(entry.get("id") or "")
        if not call_id or call_id in used_ids or any(call.id == call_id for call in calls):
            call_id = new_id()
        written = str(function.get("name") or "")
        name = matching_tool(written, offered) or written
        arguments = arguments_text(_first(function, ("arguments", "parameters", "input")))
        calls.append(ToolCall(call_id, name, arguments, written if name != written else ""))
    return calls


def call_entries(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a message has of calls, each with its `function`; what is no call is left out."""
    entries = message.get("tool_calls")
    entries = [entries] if isinstance(entries, dict) else entries
    found = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("function"), dict):
            found.append(entry)
        elif "function" not in entry and isinstance(entry.get("name"), str):
            found.append({"id": entry.get("id"), "function": entry})
    legacy = message.get("function_call")
    if not found and isinstance(legacy, dict) and legacy.get("name"):
        found.append({"function": legacy})
    return found


def new_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid4().hex[:24]}"


def arguments_text(value: object) -> str:
    """Arguments as text: as written where they are text, `{}` where there are none."""
    if value is None:
        return "{}"
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not value.strip():
        return "{}"
    return _without_lone_surrogates(value) if "\\u" in value else value


def _without_lone_surrogates(arguments: str) -> str:
    """Arguments with half of an emoji as an escape in them are mended, so that what is saved is what was executed."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        cleaned = clean_surrogates(value)
        return arguments if cleaned == value else json.dumps(cleaned, ensure_ascii=False)
    return arguments


def calls_in_text(text: str, offered: Collection[str]) -> tuple[list[ToolCall], str]:
    """Calls that were written as text, and the text without them; all of what looks like a call must be one."""
    if not offered or not text:
        return [], text
    if _OPENING in text:
        said, *blocks = text.split(_OPENING)
        calls = [call for block in blocks for call in _calls_of_block(block, offered)]
        is_quoted = said.endswith("`") or said.count("```") % 2 == 1
        return ([], text) if is_quoted or None in calls else ([call for call in calls if call], said.strip())
    fenced = _FENCED.fullmatch(text)
    calls = list(_calls_of_json(fenced[1] if fenced else text, offered, needs_arguments=True))
    return ([], text) if not calls or None in calls else ([call for call in calls if call], "")


def _calls_of_block(text: str, offered: Collection[str]) -> Iterator[ToolCall | None]:
    text = text.strip().removesuffix(_CLOSING)
    function = _FUNCTION.fullmatch(text)
    if function is None:
        yield from _calls_of_json(text, offered, needs_arguments=False)
        return
    # Qwen3-Coder's own form: values are bare text, which the tool's schema turns into what they are.
    arguments = {parameter[1].strip(): parameter[2] for parameter in _PARAMETER.finditer(function[2])}
    yield _text_call(function[1].strip(), arguments, offered)


def _calls_of_json(text: str, offered: Collection[str], *, needs_arguments: bool) -> Iterator[ToolCall | None]:
    """The calls that a text is, as JSON; None for what is none."""
    if text.lstrip()[:1] not in ("{", "["):
        yield None
        return
    try:
        value = clean_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        yield None
        return
    for entry in value if isinstance(value, list) else [value]:
        yield _json_call(entry, offered, needs_arguments=needs_arguments)


def _json_call(entry: object, offered: Collection[str], *, needs_arguments: bool) -> ToolCall | None:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = _first(entry, ("arguments", "parameters"))
    if needs_arguments and (arguments is None or entry.keys() - {"name", "arguments", "parameters", "id", "type"}):
        return None
    return _text_call(entry["name"], arguments, offered)


def _text_call(written: str, arguments: object, offered: Collection[str]) -> ToolCall | None:
    name = matching_tool(written, offered)
    return name and ToolCall(new_id(), name, arguments_text(arguments), AS_TEXT + written) or None


def _first(mapping: Mapping[str, Any], names: Iterable[str]) -> object:
    """The first of some fields that is there."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)
