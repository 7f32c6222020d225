"""Chat completions as streams: what a server sends piece by piece for a body that it could have sent whole."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
PIECE_CHARS = 7


def event(chunk: object) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def as_stream(body: Mapping[str, Any], *, include_usage: bool = True) -> bytes:
    """A body as a stream: what was sent whole is sent in pieces."""
    if not isinstance(body.get("choices"), list) or not body["choices"]:
        return event(body) + DONE
    head = {name: value for name, value in body.items() if name not in ("choices", "usage", "object", "error")}
    head["object"] = "chat.completion.chunk"
    events = [b": keep-alive\n\n"]
    for choice in body["choices"]:
        events += [event(head | {"choices": [part]}) for part in _choice_pieces(choice)]
    if body.get("error"):
        events.append(event(head | {"choices": [], "error": body["error"]}))
    if include_usage and "usage" in body:
        events.append(event(head | {"choices": [], "usage": body["usage"]}))
    return b"".join([*events, DONE])


def _choice_pieces(choice: object) -> Iterator[object]:
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        yield choice
        return
    index = choice.get("index", 0)
    for delta in deltas(choice["message"]):
        yield {"index": index, "delta": delta, "finish_reason": None}
    rest = {name: value for name, value in choice.items() if name not in ("index", "message")}
    yield {"index": index, "delta": {}} | rest


def deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message's pieces, in the order in which models write: reasoning, text, calls."""
    yield {"role": "assistant", "content": "" if isinstance(message.get("content"), str) else None}
    for name in sorted(message.keys() - {"role", "content", "tool_calls", "reasoning_details"}):
        value = message[name]
        yield from ({name: piece} for piece in (pieces_of(value) if isinstance(value, str) else [value]))
    for number, detail in enumerate(message.get("reasoning_details") or ()):
        yield from ({"reasoning_details": [piece]} for piece in _detail_pieces(detail, number))
    content = message.get("content")
    if content is not None:
        yield from ({"content": piece} for piece in (pieces_of(content) if isinstance(content, str) else [content]))
    calls = message.get("tool_calls")
    for number, entry in enumerate(calls) if isinstance(calls, list) else ():
        yield from ({"tool_calls": [piece]} for piece in _call_pieces(entry, number))


def pieces_of(text: str) -> Sequence[str]:
    """A text, cut."""
    return [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]


def _detail_pieces(detail: object, number: int) -> Iterator[object]:
    if not isinstance(detail, dict):
        yield detail
        return
    placed = detail if "index" in detail else {**detail, "index": number}
    field = next((name for name in ("text", "summary") if isinstance(detail.get(name), str)), None)
    if field is None:
        yield placed
        return
    first = {name: value for name, value in placed.items() if name != "signature"}
    kind = {name: placed[name] for name in ("type", "index") if name in placed}
    texts = pieces_of(detail[field]) or [""]
    yield first | {field: texts[0]}
    yield from (kind | {field: text} for text in texts[1:])
    if "signature" in detail:
        yield kind | {"signature": detail["signature"]}


def _call_pieces(entry: object, number: int) -> Iterator[object]:
    if not isinstance(entry, dict) or not isinstance(entry.get("function"), dict):
        yield {**entry, "index": number} if isinstance(entry, dict) else entry
        return
    function = entry["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        yield {**entry, "index": number}
        return
    yield {**entry, "index": number, "function": {**function, "arguments": ""}}
    yield from ({"index": number, "function": {"arguments": piece}} for piece in pieces_of(arguments))
