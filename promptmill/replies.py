"""Reading a chat completion: text, reasoning, tool calls, usage. Everything in it is untrusted.

What is no whole reply of a model (an error within a 200, a reply that broke off, no choices) is a ValueError and never
a message: a provider's failure text must not become training data.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from promptmill.prices import number_of, reported_cost_usd
from promptmill.quirks.base import ModelRequest
from promptmill.reasoning import DETAIL_FIELDS, split_reasoning, thinking_parts
from promptmill.records import Message, ModelReply, ToolCall, Usage
from promptmill.tool_calls import call_entries, calls_in_text, native_calls
from toolsets.text import shortened

CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"})
FAILED = frozenset({"error", "abort", "cancelled", "insufficient_system_resource", "network_error"})
REFUSED = frozenset(
    {"content_filter", "refusal", "safety", "sensitive", "prohibited_content", "blocklist", "spii", "recitation"}
)
"""Finish reasons, in lower case, of OpenAI and its imitators: DeepSeek (`insufficient_system_resource`), Z.ai
(`sensitive`, `network_error`), SGLang (`abort`), Mistral (`model_length`), Google (`SAFETY`, …)."""

MAX_SHOWN_CHARS = 300

MAX_TOKENS = 2**40
"""No call has more; a count above it is nonsense that would spoil the sums."""

PROMPT_NAMES = ("prompt_tokens", "input_tokens")
COMPLETION_NAMES = ("completion_tokens", "output_tokens")


def read_reply(data: object, request: ModelRequest | None = None) -> ModelReply:
    """Read a decoded response body, streamed (see `streaming`) or not.

    Args:
        data: The body.
        request: What was asked, after all quirks: its tools are those that a call can mean, its messages have the ids
            that are taken, its token limit tells a cut reply from a whole one whatever the endpoint says.

    Raises:
        ValueError: it is no whole chat completion; the message says what it is instead.
    """
    request = request or ModelRequest((), ())
    body = data if isinstance(data, dict) else {}
    choice = _whole_choice(body, data)
    message = choice["message"]
    usage = read_usage(body.get("usage"))
    finish_reason = _finish_reason(choice)
    reasoning, content = split_reasoning(message)
    calls, content = _read_calls(message, content, request)
    return ModelReply(
        message=Message(
            role="assistant",
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(calls),
            echo=_echo(message, calls),
        ),
        finish_reason=finish_reason,
        usage=usage,
        cut=finish_reason.lower() in CUT or (bool(calls) and _is_at_limit(usage, request.fields)),
        refusal=_refusal(message),
        reasoning_field=next((name for name in ("reasoning_content", "reasoning") if message.get(name)), ""),
    )


def error_in(data: object) -> object:
    """The error that a body with status 200 reports, wherever it stands; None where it reports none."""
    if not isinstance(data, dict):
        return None
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    reported = data.get("error") or choice.get("error") or (data if data.get("object") == "error" else None)
    if reported:
        return reported
    reason = _finish_reason(choice)
    return f"the reply broke off with finish reason {reason!r}" if reason.lower() in FAILED else None


def _whole_choice(body: Mapping[str, Any], data: object) -> dict[str, Any]:
    """The first choice, which has a message. Raises ValueError."""
    error = error_in(body)
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if error is None and isinstance(choice, dict) and isinstance(choice.get("message"), dict):
        return choice
    said = str((error.get("message") if isinstance(error, dict) else error) or error or data)
    raise ValueError(f"the endpoint answered without a whole message: {shortened(said, MAX_SHOWN_CHARS)}")


def _finish_reason(choice: Mapping[str, Any]) -> str:
    """Why the reply ended; SGLang has been seen to send an object."""
    reason = choice.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason
    return reason if isinstance(reason, str) else ""


def _read_calls(message: Mapping[str, Any], content: str, request: ModelRequest) -> tuple[list[ToolCall], str]:
    """A message's calls, and its text without those that were written as text."""
    offered = _offered(request)
    used_ids = {call.id for earlier in request.messages for call in earlier.tool_calls}
    calls = native_calls(message, offered, used_ids)
    return (calls, content) if calls else calls_in_text(content, offered)


def _offered(request: ModelRequest) -> Collection[str]:
    return [tool["function"]["name"] for tool in request.tools]


def _is_at_limit(usage: Usage, fields: Mapping[str, Any]) -> bool:
    """Whether a reply took just the tokens it was allowed: a call in it may be incomplete although it looks whole.

    Servers that parse calls out of text close the JSON themselves, and say `tool_calls` where it was `length`. One that
    counts more than it was allowed does not know the limit.
    """
    limit = fields.get("max_tokens") or fields.get("max_completion_tokens")
    return isinstance(limit, int) and usage.completion_tokens == limit


def _echo(message: Mapping[str, Any], calls: Collection[ToolCall]) -> dict[str, Any]:
    """What the endpoint wants back unchanged: reasoning that is signed or encrypted, and what it tied to calls.

    Sources: https://openrouter.ai/docs/use-cases/reasoning-tokens#preserving-reasoning-blocks,
    https://docs.litellm.ai/docs/reasoning_content (`thinking_blocks`),
    https://docs.mistral.ai/capabilities/reasoning/ (content parts),
    https://ai.google.dev/gemini-api/docs/thought-signatures (`extra_content` of a call).
    """
    echo: dict[str, Any] = {name: message[name] for name in DETAIL_FIELDS if message.get(name)}
    if thinking_parts(message.get("content")) and not any(call.written for call in calls):
        echo["content"] = message["content"]
    entries = call_entries(message)
    if any(entry.get("extra_content") for entry in entries):
        echo["tool_calls"] = [
            call.as_openai() | ({"extra_content": entry["extra_content"]} if entry.get("extra_content") else {})
            for call, entry in zip(calls, entries, strict=True)
        ]
    return echo


def _refusal(message: Mapping[str, Any]) -> str:
    """The model's own refusal. Source: https://platform.openai.com/docs/guides/structured-outputs#refusals"""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    said = [message.get("refusal"), *(part.get("refusal") for part in parts if isinstance(part, dict))]
    return "\n".join(text.strip() for text in said if isinstance(text, str) and text.strip())


def read_usage(value: object) -> Usage:
    """Token counts, under either of their names.

    Nothing is reported where the endpoint says nothing, and where it says what is no count: limits then say that they
    cannot be kept, instead of counting 0.
    """
    if not isinstance(value, dict):
        return Usage()
    counts = [_named(value, *names) for names in (PROMPT_NAMES, COMPLETION_NAMES, ("total_tokens",))]
    prompt, completion, total = (_count(count) for count in counts)
    if total is not None and prompt is None:
        prompt = max(0, total - (completion or 0))
    elif total is not None and completion is None:
        completion = max(0, total - (prompt or 0))
    is_reported = any(count is not None for count in (prompt, completion))
    is_readable = all(_count(count) is not None for count in counts[:2] if count is not None)
    cost_usd = reported_cost_usd(value)
    return Usage(
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        reasoning_tokens=_detail(value, COMPLETION_NAMES, "reasoning_tokens"),
        cached_tokens=_detail(value, PROMPT_NAMES, "cached_tokens"),
        reported_calls=int(is_reported and is_readable),
        cost_usd=cost_usd or 0.0,
        priced_calls=int(cost_usd is not None),
    )


def _named(mapping: Mapping[str, Any], *names: str) -> object:
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def _detail(usage: Mapping[str, Any], names: Sequence[str], detail: str) -> int:
    details = _named(usage, *(f"{name}_details" for name in names))
    return (_count(details.get(detail)) or 0) if isinstance(details, dict) else 0


def _count(value: object) -> int | None:
    """A whole number from 0, however it is written; None where it is none."""
    number = number_of(value)
    return min(int(number), MAX_TOKENS) if number is not None and number == int(number) else None


def refusal_reason(reply: ModelReply) -> str:
    """Why the provider or the model would not answer; "" when it did. Asking again would change nothing."""
    if reply.refusal:
        return f"the model refused: {shortened(reply.refusal, MAX_SHOWN_CHARS)}"
    return "the provider's content filter ended the reply" if reply.finish_reason.lower() in REFUSED else ""


def is_empty(reply: ModelReply) -> bool:
    """Whether a reply has neither text nor a tool call, though nothing cut it."""
    return not reply.message.content and not reply.message.tool_calls and not reply.cut
