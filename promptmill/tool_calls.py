"""Tool calls of a message: from whatever a model or a server wrote to calls that can be executed and answered.

Each has an id of its own in its conversation, a name that is an offered tool's where it can mean only that, and its
arguments as text, as the model wrote them.

A call that a model wrote as text is taken for a call only where tools were offered and nothing follows it: an answer
may speak of calls. It stands in `<tool_call>` tags (Qwen, Hermes), or the JSON is the whole text (small Llama models,
servers without a tool parser) and names an offered tool. What stands in tags on lines of their own is a call although
no tool has its name or its JSON is broken: it gets the error that a native call gets, since an answer it is not.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from uuid import uuid4

import orjson

from promptmill.records import ToolCall
from toolsets.names import MAX_NAME_CHARS, matching_tool
from toolsets.text import clean_surrogates

AS_TEXT = "text:"
"""Before the name of a call that was written as text, in `ToolCall.written`."""
ARGUMENT_FIELDS = ("arguments", "parameters", "input")
MAX_BROKEN_CALLS = 10
"""A text with more of them is noise and no calls."""

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_END_OF_FUNCTION, _END_OF_PARAMETER = "</function>", "</parameter>"
_FENCE = "```"
_BLANKS = re.compile(r"\s*")
_FUNCTION = re.compile(rf"<function=([^<>\n]{{1,{MAX_NAME_CHARS}}})>")
_PARAMETER = re.compile(rf"<parameter=([^<>\n]{{1,{MAX_NAME_CHARS}}})>\n?")
_NAME = re.compile(rf'"name"\s*:\s*"([^"\\\n]{{1,{MAX_NAME_CHARS}}})"')
_NAME_FIRST = re.compile(rf"\{{\s*{_NAME.pattern}")
_DECODER = json.JSONDecoder()


def native_calls(message: Mapping[str, Any], offered: Collection[str], used_ids: Collection[str]) -> list[ToolCall]:
    """The calls in `tool_calls`, or in the older `function_call`."""
    calls: list[ToolCall] = []
    taken = set(used_ids)
    for entry in call_entries(message):
        function = entry["function"]
        call_id = word(entry.get("id"))
        if not call_id or call_id in taken:
            call_id = new_id()
        taken.add(call_id)
        written, arguments = word(function.get("name")), arguments_text(arguments_of(function))
        name = matching_tool(written, offered) or written
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


def word(value: object) -> str:
    """An id or a name: a text, or a number that stands for one; empty where it is neither."""
    if isinstance(value, int) and not isinstance(value, bool) and value and abs(value) < 2**63:
        return str(value)
    return value if isinstance(value, str) else ""


def arguments_of(function: Mapping[str, Any]) -> object:
    """A call's arguments, under whichever name they stand; None where there are none."""
    return _first(function, ARGUMENT_FIELDS)


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
            cleaned = clean_surrogates(value)
            return arguments if cleaned == value else json.dumps(cleaned, ensure_ascii=False)
        except (ValueError, RecursionError):
            return arguments
    return arguments


def calls_in_text(text: str, offered: Collection[str]) -> tuple[list[ToolCall], str]:
    """Calls that were written as text, and the text without them; all of what looks like a call must be one."""
    if not offered or not text:
        return [], text
    label, fenced = _fenced(text)
    if label == "tool_call":
        return _or_text(_tagged_calls(f"{_OPENING}{fenced}{_CLOSING}", 0, offered), text)
    start = text.find(_OPENING)
    if start < 0:
        return _or_text(_json_calls(text if label is None else fenced, offered), text)
    said = text[:start]
    if said.endswith("`") or said.count(_FENCE) % 2 == 1:
        return [], text
    calls = _tagged_calls(text, start, offered)
    has_own_line = not said.strip() or said.rstrip(" \t").endswith("\n")
    if has_own_line or all(call.name in offered and call.json_arguments == call.arguments for call in calls):
        return _or_text(calls, text, said.strip())
    return [], text


def _or_text(calls: list[ToolCall], text: str, said: str = "") -> tuple[list[ToolCall], str]:
    return (calls, said) if calls else ([], text)


def _fenced(text: str) -> tuple[str | None, str]:
    """Label and content of the code fence that a text is; None where it is none."""
    label, line_end, inner = text.removeprefix(_FENCE).partition("\n")
    is_fence = text.startswith(_FENCE) and line_end and inner.endswith(_FENCE)
    label = label.strip()
    return (label, inner.removesuffix(_FENCE)) if is_fence and label in ("", "json", "tool_call") else (None, "")


def _json_calls(text: str, offered: Collection[str]) -> list[ToolCall]:
    """The calls that a text is, as JSON and nothing else; none where any of it is no call of an offered tool."""
    if text.lstrip()[:1] not in ("{", "["):
        return []
    try:
        calls = _calls_of(json.loads(text), offered, needs_arguments=True)
    except (ValueError, RecursionError):
        return []
    return calls if all(call.name in offered for call in calls) else []


def _calls_of(value: object, offered: Collection[str], *, needs_arguments: bool) -> list[ToolCall]:
    """The calls that a JSON value is; none where any of it is no call. Raises RecursionError."""
    entries = value if isinstance(value, list) else [value]
    calls = [_json_call(entry, offered, needs_arguments=needs_arguments) for entry in entries]
    return [] if None in calls else [call for call in calls if call]


def _json_call(entry: object, offered: Collection[str], *, needs_arguments: bool) -> ToolCall | None:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = _first(entry, ("arguments", "parameters"))
    if needs_arguments and (arguments is None or entry.keys() - {"name", "arguments", "parameters", "id", "type"}):
        return None
    return _text_call(clean_surrogates(entry["name"]), arguments_text(clean_surrogates(arguments)), offered)


def _text_call(written: str, arguments: str, offered: Collection[str]) -> ToolCall:
    return ToolCall(new_id(), matching_tool(written, offered) or written, arguments, AS_TEXT + written)


def _tagged_calls(text: str, place: int, offered: Collection[str]) -> list[ToolCall]:
    """The calls in tags that a text is from a place on; none where anything else stands between or after them."""
    calls: list[ToolCall] = []
    broken = 0
    while place < len(text):
        if not text.startswith(_OPENING, place):
            return []
        start = _after_blanks(text, place + len(_OPENING))
        found = _tagged_json(text, start, offered) or _tagged_function(text, start, offered)
        if found is None:
            broken += 1
            found = _broken_call(text, start, offered) if broken <= MAX_BROKEN_CALLS else None
        if found is None:
            return []
        calls += found[0]
        place = found[1]
    return calls


def _after_blanks(text: str, place: int) -> int:
    match = _BLANKS.match(text, place)
    return match.end() if match else place


def _block_end(text: str, place: int) -> int | None:
    """Where what comes after a block begins; None where the block does not end at a place."""
    place = _after_blanks(text, place)
    if text.startswith(_CLOSING, place):
        return _after_blanks(text, place + len(_CLOSING))
    return place if place == len(text) or text.startswith(_OPENING, place) else None


def _tagged_json(text: str, start: int, offered: Collection[str]) -> tuple[list[ToolCall], int] | None:
    """The calls of a block of JSON, and where the next block begins."""
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        value, stop = _DECODER.raw_decode(text, start)
        calls = _calls_of(value, offered, needs_arguments=False)
    except (ValueError, RecursionError):
        return None
    end = _block_end(text, stop)
    return None if end is None or not calls else (calls, end)


def _tagged_function(text: str, start: int, offered: Collection[str]) -> tuple[list[ToolCall], int] | None:
    """Qwen3-Coder's own form: values are bare text, which the tool's schema turns into what they are."""
    function = _FUNCTION.match(text, start)
    if function is None:
        return None
    arguments: dict[str, str] = {}
    place = _after_blanks(text, function.end())
    while parameter := _PARAMETER.match(text, place):
        stop = text.find(_END_OF_PARAMETER, parameter.end())
        value = text[parameter.end() : stop]
        if stop < 0 or "<parameter=" in value or _END_OF_FUNCTION in value:
            return None  # its end is missing: what was found is another's
        arguments[parameter[1].strip()] = value.removesuffix("\n")
        place = _after_blanks(text, stop + len(_END_OF_PARAMETER))
    if text.startswith(_END_OF_FUNCTION, place):
        place += len(_END_OF_FUNCTION)
    elif not arguments:
        return None
    end = _block_end(text, place)
    return None if end is None else ([_text_call(function[1].strip(), arguments_text(arguments), offered)], end)


def _broken_call(text: str, start: int, offered: Collection[str]) -> tuple[list[ToolCall], int] | None:
    """A block that means a call and is none: its arguments are all of it, which no tool takes."""
    stop = text.find(_CLOSING, start)
    is_meant = text.startswith(("{", "[", "<function="), start) if stop >= 0 else _NAME_FIRST.match(text, start)
    if not is_meant:
        return None
    block = text[start : stop if stop >= 0 else len(text)].rstrip()
    name = _FUNCTION.match(block) or _NAME.search(block)
    call = _text_call(name[1].strip() if name and not _is_json(block) else "", block, offered)
    end = len(text) if stop < 0 else _block_end(text, stop)
    return None if end is None else ([call], end)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _first(mapping: Mapping[str, Any], names: Iterable[str]) -> object:
    """The first of some fields that is there."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)
