"""Tool calls for a model whose chat template knows no tools: a JSON schema forces one, plain chat then answers.

llama.cpp leaves `tools` out of the prompt when the template has no place for them, and the model never calls any. Its
`response_format` on the other hand is enforced by a grammar, so even a tiny model writes a call that can be executed.

How it goes
    The prompt is met by a forced call, `{"thought": …, "tool": …, "arguments": …}`, which becomes the reply's reasoning
    and tool call.
    The tool's result is met by plain chat without tools, which gives the answer.

Measured with the demonstration model (135M parameters, temperature 0, 12 to 14 prompts): with no examples 4 of 13 calls
were right, with one made-up example per tool, the first tool's last, 11 of 14; examples in the catalog's order gave 5.
Free to call again or to answer after a result, it called again or answered with words of the examples; so it is not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from promptmill.config import ModelSettings
from promptmill.quirks.base import ModelRequest, Quirk
from promptmill.records import Message, ModelReply, ToolCall
from promptmill.tool_calls import arguments_text, new_id

DEFAULT_MAX_TOKENS = 512
"""A tiny model that loops does so until its context is full; this ends it within seconds."""
MAX_EXAMPLES = 8
MAX_THOUGHT_CHARS = 120
MAX_STRING_CHARS = 1000
"""Within the default `max_tokens` the call is then mostly complete, however much the model repeats itself."""
MAX_ITEMS = 10
MAX_DESCRIPTION_CHARS = 120
EXAMPLE_WORDS = ("alpha", "beta", "gamma delta", "epsilon", "zeta", "eta", "theta", "iota")

_FORM = "\n\nTools:\n{tools}\n\nAnswer with JSON: " + '{{"thought": "WHY", "tool": "NAME", "arguments": {{}}}}'


class SchemaCalls(Quirk):
    """Endpoints with the trait `no_tool_template`."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return "no_tool_template" in settings.endpoint.traits

    def change_request(self, request: ModelRequest) -> None:
        """Force a call where tools are offered and no result waits for its answer; render calls and results as text."""
        # Temperature 0 unless one was asked for: chance only takes a small model off the few calls it gets right.
        request.fields = {"temperature": 0, "max_tokens": DEFAULT_MAX_TOKENS} | request.fields
        messages = [_as_text(message) for message in request.messages]
        if request.tools and request.messages[-1].role != "tool":
            functions = [tool["function"] for tool in request.tools]
            messages = [*_introduction(messages, functions), *(m for m in messages if m.role != "system")]
            request.fields["response_format"] = _response_format(functions)
        elif self.settings.model == "local":
            # The demonstration model says what it has to say in one paragraph, and repeats itself in all that follow.
            request.fields.setdefault("stop", ["\n\n"])
        request.messages = _merged(messages)
        request.tools = ()

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """The forced call as reasoning and tool call; a call that is not complete stays the text it is."""
        if "response_format" not in request.fields:
            return reply
        call = _complete_call(reply.message.content)
        if call is None:
            return reply
        thought, tool_call = call
        message = replace(reply.message, content="", reasoning=thought, tool_calls=(tool_call,))
        # The object may be whole although the token limit ended the reply: the limit then fell on its last token.
        return replace(reply, message=message, finish_reason="tool_calls", cut=False)


def _complete_call(content: str) -> tuple[str, ToolCall] | None:
    try:
        match orjson.loads(content):
            case {"thought": str(thought), "tool": str(name), "arguments": dict(arguments)}:
                return thought.strip(), ToolCall(new_id(), name, arguments_text(arguments))
    except (orjson.JSONDecodeError, RecursionError):
        return None
    return None


def _as_text(message: Message) -> Message:
    """A message as plain chat has it: what was called as what the model thought of it, a result as the user's words."""
    if message.role == "tool":
        # Worded so, the demonstration model repeats the result; with "Tool result:" it makes one up.
        return Message("user", f"The tool {message.name} gave: {message.content}")
    if not message.tool_calls:
        return Message(message.role, message.content)
    said = [message.content or message.reasoning]
    said += [] if said[0] else [f"I use {call.name} with {call.json_arguments}." for call in message.tool_calls]
    return Message("assistant", "\n".join(text for text in said if text))


def _merged(messages: Iterable[Message]) -> list[Message]:
    """Neighbours of one role as one message, since many templates want the roles to alternate."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return merged


def _introduction(messages: Sequence[Message], functions: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The system message with the tools in it, and an example of a call for each tool.

    The first tools are those most likely wanted, and the last example is the one a small model follows most.
    """
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    tools = "\n".join(_tool_line(function) for function in functions)
    words = _example_words(functions)
    introduction = [Message("system", (system + _FORM.format(tools=tools)).strip())]
    for function in reversed(functions[:MAX_EXAMPLES]):
        introduction += _example(function, words)
    return introduction


def _tool_line(function: Mapping[str, Any]) -> str:
    description = str(function.get("description", "")).split(". ")[0].rstrip(".")[:MAX_DESCRIPTION_CHARS]
    return f"- {function['name']}({', '.join(_required(function))}): {description}."


def _example_words(functions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """One word for each parameter name, the same in every tool, of a kind that no prompt contains."""
    names = dict.fromkeys(name for function in functions for name in _required(function))
    return {name: EXAMPLE_WORDS[position % len(EXAMPLE_WORDS)] for position, name in enumerate(names)}


def _example(function: Mapping[str, Any], words: Mapping[str, str]) -> list[Message]:
    name = function["name"]
    arguments = {key: _example_value(schema, words[key]) for key, schema in _required(function).items()}
    shown = {key: orjson.dumps(value).decode().strip('"') for key, value in arguments.items()}
    asked = f"Use {name}" + (" with " if shown else "") + ", ".join(f"{key} `{value}`" for key, value in shown.items())
    thought = f"I use {name}" + (" with " if shown else "") + " and ".join(shown.values())
    call = {"thought": f"{thought}.", "tool": name, "arguments": arguments}
    return [Message("user", f"{asked}."), Message("assistant", orjson.dumps(call).decode())]


def _example_value(schema: Mapping[str, Any], word: str) -> object:
    if choices := schema.get("enum"):
        return choices[0]
    values: dict[str, object] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    return values.get(_type(schema), word)


def _response_format(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    schema = {"anyOf": [_call_schema(function) for function in functions]}
    return {"type": "json_schema", "json_schema": {"name": "call", "strict": True, "schema": schema}}


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return _object_schema(
        {
            "thought": {"type": "string", "minLength": 1, "maxLength": MAX_THOUGHT_CHARS},
            "tool": {"const": function["name"]},
            "arguments": _object_schema({key: _simple(schema) for key, schema in _required(function).items()}),
        }
    )


def _object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _required(function: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The parameters without which there is no call. A small model fills in every other one too, and wrongly."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties", {})
    return {name: properties[name] for name in parameters.get("required", ()) if name in properties}


def _simple(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's schema in the words that the grammar knows, with an end to everything."""
    if "enum" in schema:
        return {"enum": list(schema["enum"])}
    match _type(schema):
        case "integer" | "number" | "boolean" as name:
            return {"type": name}
        case "array":
            return {"type": "array", "items": _simple(schema.get("items") or {}), "maxItems": MAX_ITEMS}
        case "object" if schema.get("properties"):
            return _object_schema({name: _simple(part) for name, part in _required({"parameters": schema}).items()})
        case "object":
            return {"type": "object"}
    return {"type": "string", "maxLength": MAX_STRING_CHARS}


def _type(schema: Mapping[str, Any]) -> str:
    """The first of its types that is not null; a string where none is said."""
    declared = schema.get("type", "string")
    names = [declared] if isinstance(declared, str) else [name for name in declared if name != "null"]
    return names[0] if names else "string"
