"""The Hermes function-calling text format: everything a model reads or writes is inside the text of the turns.

Turns are `{"from", "value"}` and nothing else.

    system   what function calling is, the tools as one JSON array in `<tools>`, the schema of a call; after a blank
             line the run's own system prompt, where it has one
    human    the prompt, verbatim
    gpt      a `<think>` block (empty where there was no reasoning), the text, then one `<tool_call>` block per call
    tool     one turn for all results of the gpt turn before it: `<tool_response>` blocks in the order of the calls

Nothing a model or a tool wrote can open or close one of these blocks. Where it wrote one of their tags,
    inside JSON       `<` becomes `\\u003c`, which every JSON reader gives back as `<`
    in text           `<` becomes `&lt;`, and the `&` of a text that looked like that already becomes `&amp;`
and no other text is touched. `hermes_reader.read_back` gives back what was written.

A result is nested as an object where it is the compact JSON object that our tools write, and else stays the string it
is: so it comes back to the letter, and a file that merely looks like JSON does not change its type.

Rows that hermes-agent wrote are in this format already, and pass unchanged.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import orjson

from promptmill.exports.sharegpt import split_think
from promptmill.records import ToolCall
from promptmill.rows import DOCUMENTED_DEFAULTS

BEFORE_TOOLS = (
    "You are a function calling AI model. The signatures of your functions are inside <tools> </tools> XML tags. "
    "Call one or more of them where they help with what the user asks; where none does, answer in plain language. "
    "Never guess the values of a function's arguments. What a function returns is given to you inside "
    "<tool_response> </tool_response> XML tags. These are your functions:\n<tools>\n"
)
EXAMPLE = "Example:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"
AFTER_TOOLS = (
    "\n</tools>\nA function call is a JSON object of this schema:\n"
    "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'}, "
    "'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}\n"
    f"Each call goes inside <tool_call> </tool_call> XML tags.\n{EXAMPLE}"
)
EMPTY_THINK = "<think>\n</think>"

ROLES = frozenset({"system", "human", "gpt", "tool"})

_TAG = r"/?(?:think|tools|tool_call|tool_response)\b"
_TAG_START = re.compile(rf"<(?={_TAG})", re.IGNORECASE)
_TO_ESCAPE = re.compile(rf"<(?={_TAG})|&(?=(?:amp;)*lt;{_TAG})", re.IGNORECASE)
_ESCAPED = re.compile(rf"&(?:lt;(?={_TAG})|amp;(?=(?:amp;)*lt;{_TAG}))", re.IGNORECASE)
_JSON_TOKEN = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+"?)|([,:])|\s+')
"""A string that never ends is one, too: what is no JSON is gone through only once."""


def export_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The documented keys of a row, its conversation as text. None where a turn, call or tool is of no known shape."""
    try:
        turns = _unchanged(row) if is_hermes(row) else list(_turns(row))
    except (ValueError, RecursionError):  # tools, or the arguments of another program's call, may be nested too deeply
        return None
    columns = {key: default if row.get(key) is None else row[key] for key, default in DOCUMENTED_DEFAULTS.items()}
    return columns | {"conversations": turns}


def is_hermes(row: Mapping[str, Any]) -> bool:
    """Whether another program wrote the row in this format already."""
    turns = row["conversations"]
    if row.get("content_hash") or not turns or turns[0].get("from") != "system":
        return False
    return "<tools>\n" in turns[0]["value"] and all(turn.keys() == {"from", "value"} for turn in turns)


def _unchanged(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return [_turn(turn["from"], turn["value"]) for turn in row["conversations"]]


def _turns(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The turns as text. Raises ValueError where one is of no known shape."""
    turns = row["conversations"]
    has_system = bool(turns) and turns[0].get("from") == "system"
    yield _turn("system", system_value(row.get("tools") or "[]", turns[0]["value"] if has_system else ""))
    calls: Sequence[ToolCall] = ()
    for is_results, group in groupby(turns[has_system:], key=lambda turn: turn.get("from") == "tool"):
        if is_results:
            yield _turn("tool", _tool_value(list(group), calls))
            continue
        for turn in group:
            calls = _calls_of(turn)
            is_gpt = turn.get("from") == "gpt"
            yield _turn(turn.get("from"), _gpt_value(turn["value"], calls) if is_gpt else turn["value"])


def _turn(role: object, value: str) -> dict[str, str]:
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"no turn of this format is from {role!r}")
    return {"from": role, "value": value}


def system_value(tools_json: str, own_prompt: str) -> str:
    """The system turn: the preamble with the tools in alphabetical order, then the run's own prompt.

    Raises:
        ValueError: the tools are no JSON list of named functions.
    """
    tools = orjson.loads(tools_json)
    if not isinstance(tools, list):
        raise ValueError("the tools are no list")
    entries = sorted((_tool_entry(tool) for tool in tools), key=lambda entry: entry["name"])
    preamble = BEFORE_TOOLS + _safe(json.dumps(entries, ensure_ascii=False)) + AFTER_TOOLS
    return f"{preamble}\n\n{own_prompt}" if own_prompt else preamble


def _tool_entry(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool without a name")
    # `required` is null in every file of this format; the list of required arguments is inside `parameters`.
    return {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
        "required": None,
    }


def _calls_of(turn: Mapping[str, Any]) -> list[ToolCall]:
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError("the tool calls of a turn are no list")
    return [_read_call(call) for call in calls]


def _read_call(call: object) -> ToolCall:
    """A call of a saved turn, whoever saved it. Raises ValueError."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call without a name")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id") or ""), function["name"], text)


def _gpt_value(saved: str, calls: Sequence[ToolCall]) -> str:
    reasoning, text = split_think(saved)
    parts = [f"<think>\n{escaped_text(reasoning)}\n</think>" if reasoning.strip() else EMPTY_THINK]
    parts += [escaped_text(text)] if text else []
    for call in calls:
        arguments = respaced(call.json_arguments, ", ", ": ")
        parts.append(_block("tool_call", f'{{"name": {_encoded(call.name)}, "arguments": {arguments}}}'))
    return "\n".join(parts)


def _tool_value(results: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall]) -> str:
    """All results of one gpt turn, each under the name of the call that has its id."""
    position = {call.id: number for number, call in enumerate(calls)}
    name = {call.id: call.name for call in calls}
    blocks = []
    for result in sorted(results, key=lambda result: position.get(str(result.get("tool_call_id")), len(calls))):
        call_id = str(result.get("tool_call_id") or "")
        fields = {
            "tool_call_id": _encoded(call_id),
            "name": _encoded(name.get(call_id, str(result.get("name") or "unknown"))),
            "content": _content(result["value"]),
        }
        json_text = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        blocks.append(_block("tool_response", f"{{{json_text}}}"))
    return "\n".join(blocks)


def _content(result: str) -> str:
    """A result as JSON: the object that it is, where it can be told apart from its text again, else a string."""
    if result.startswith("{") and _is_json(result) and respaced(result, ",", ":") == result:
        return respaced(result, ", ", ": ")
    return _encoded(result)


def _block(tag: str, json_text: str) -> str:
    return f"<{tag}>\n{_safe(json_text)}\n</{tag}>"


def _safe(json_text: str) -> str:
    """JSON in which no tag of the format is spelt out; it means the same."""
    return _TAG_START.sub(r"\\u003c", json_text)


def _encoded(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def respaced(json_text: str, comma: str, colon: str) -> str:
    """Valid JSON with other separators and no other white space; non-ASCII is spelt out.

    Works on the text, so that numbers of any size or precision stay as written, and repeated keys stay.
    """

    def token(match: re.Match[str]) -> str:
        string, separator = match.groups()
        if string is not None:
            return _encoded(json.loads(string)) if "\\" in string else str(string)
        return {",": comma, ":": colon, None: ""}[separator]

    return _JSON_TOKEN.sub(token, json_text)


def escaped_text(text: str) -> str:
    """Text in which no tag of the format is spelt out; `unescaped_text` gives it back."""
    return _TO_ESCAPE.sub(lambda match: "&lt;" if match[0] == "<" else "&amp;", text)


def unescaped_text(text: str) -> str:
    """The text that `escaped_text` was given."""
    return _ESCAPED.sub(lambda match: "<" if match[0].lower() == "&lt;" else "&", text)
