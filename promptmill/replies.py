"""Reading a chat completion: text, reasoning, tool calls, usage. Everything in it is untrusted.

Reasoning is taken once, from the first of `reasoning`, `reasoning_content`, `reasoning_details`, thinking parts of the
content and leading inline tags that has any; what was taken from tags is taken out of the text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import orjson

from promptmill.records import Message, ModelReply, ToolCall, Usage

_INLINE = re.compile(r"\A\s*<(think|thinking|thought|reasoning|REASONING_SCRATCHPAD)>(.*?)</\1>\s*", re.DOTALL)


def read_reply(data: object) -> ModelReply:
    """Read a decoded response body.

    Raises:
        ValueError: it is no chat completion; the message says what it is instead.
    """
    body = data if isinstance(data, dict) else {}
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    broke_off = isinstance(choice, dict) and (choice.get("error") or choice.get("finish_reason") == "error")
    if not isinstance(choice, dict) or not isinstance(message, dict) or broke_off:
        error = (broke_off and choice and choice.get("error")) or body.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        raise ValueError(f"the endpoint answered without a whole message: {str(said or data)[:300]}")
    reasoning, content = split_reasoning(message)
    finish_reason = str(choice.get("finish_reason") or "")
    return ModelReply(
        message=Message(
            role="assistant",
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(_tool_calls(message.get("tool_calls"))),
            echo={name: message[name] for name in ("reasoning_details",) if message.get(name)},
        ),
        finish_reason=finish_reason,
        usage=read_usage(body.get("usage")),
        cut=finish_reason == "length",
    )


def split_reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
    """Reasoning and answer text of an assistant message."""
    content = _text(message.get("content"))
    places = (
        _text(message.get("reasoning")),
        _text(message.get("reasoning_content")),
        _from_details(message.get("reasoning_details")),
        _from_details(_thinking_parts(message.get("content"))),
    )
    reasoning = next((place for place in places if place.strip()), "")
    blocks = []
    while match := _INLINE.match(content):
        blocks.append(match[2].strip())
        content = content[match.end() :]
    if not reasoning.strip():
        reasoning = "\n\n".join(block for block in blocks if block)
    return reasoning.strip(), content.strip()


def _text(value: object) -> str:
    """Text content, or the text parts of a content list (a thinking part has its text elsewhere)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = (part.get("text") for part in value if isinstance(part, dict))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _thinking_parts(content: object) -> Sequence[Mapping[str, Any]]:
    """Parts of a content list that are reasoning, their text where `_from_details` looks for it."""
    parts = content if isinstance(content, list) else ()
    return [
        {**part, "thinking": _text(part.get("thinking"))}
        for part in parts
        if isinstance(part, dict) and part.get("type") == "thinking"
    ]


def _from_details(details: object) -> str:
    if not isinstance(details, list):
        return ""
    texts = (
        next(
            (item[key] for key in ("text", "summary", "thinking", "content") if isinstance(item.get(key), str)),
            "",
        )
        for item in details
        if isinstance(item, dict)
    )
    return "\n\n".join(text for text in texts if text.strip())


def _tool_calls(value: object) -> Sequence[ToolCall]:
    """Tool calls, each with an id of its own: a missing or repeated one is made up."""
    calls: list[ToolCall] = []
    for entry in value if isinstance(value, list) else ():
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            continue
        call_id = str(entry.get("id") or "")
        if not call_id or call_id in {call.id for call in calls}:
            call_id = f"call_{uuid4().hex[:24]}"
        calls.append(ToolCall(call_id, str(function.get("name") or ""), _arguments(function.get("arguments"))))
    return calls


def _arguments(value: object) -> str:
    if isinstance(value, str):
        return value if value.strip() else "{}"
    return "{}" if value is None else orjson.dumps(value).decode()


def read_usage(value: object) -> Usage:
    """Token counts; all zero and nothing reported when the endpoint says nothing."""
    if not isinstance(value, dict):
        return Usage()
    prompt_details = value.get("prompt_tokens_details") or {}
    completion_details = value.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=_count(value, "prompt_tokens"),
        completion_tokens=_count(value, "completion_tokens"),
        reasoning_tokens=_count(completion_details, "reasoning_tokens"),
        cached_tokens=_count(prompt_details, "cached_tokens"),
        reported_calls=1,
    )


def _count(mapping: object, name: str) -> int:
    value = mapping.get(name) if isinstance(mapping, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def refusal_reason(reply: ModelReply) -> str:
    """Why the provider or the model would not answer; "" when it did. Asking again would change nothing."""
    return "the provider's content filter ended the reply" if reply.finish_reason == "content_filter" else ""


def is_empty(reply: ModelReply) -> bool:
    """Whether a reply has neither text nor a tool call, though nothing cut it."""
    return not reply.message.content and not reply.message.tool_calls and not reply.cut
