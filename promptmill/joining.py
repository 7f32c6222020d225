"""The pieces of a streamed chat completion -> the body that it has without streaming.

Servers differ in how they send the pieces of tool calls, and all of this is met with: positions that are missing or
always 0; ids that are repeated in each piece, new in each piece, missing or empty; the name in each piece or in
several; arguments as an object; a whole call, or all calls, in one piece.

Source: https://platform.openai.com/docs/api-reference/chat-streaming,
https://openrouter.ai/docs/use-cases/reasoning-tokens (pieces of `reasoning_details`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

_DETAIL_TEXTS = ("text", "summary", "data", "thinking", "content")
"""Fields of a reasoning detail that grow piece by piece; the others, the signature among them, come once."""


class JoinedCompletion:
    """A chat completion that grows chunk by chunk."""

    def __init__(self) -> None:
        self.is_finished = False
        """Whether a finish reason came: the reply is whole, whatever else may come."""
        self.has_failed = False
        """Whether an error came instead of the rest."""
        self._fields: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._message = JoinedMessage()
        self._has_choice = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk."""
        for name, value in chunk.items():
            if name not in ("choices", "object") and (value is not None or name not in self._fields):
                self._fields[name] = value
        self.has_failed = bool(chunk.get("error")) or chunk.get("object") == "error"
        if self.has_failed:
            self._fields.setdefault("error", dict(chunk))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and not choice.get("index"):
                self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._message.add(delta)
        elif isinstance(choice.get("message"), dict) and self._message.is_empty:
            self._message.add(choice["message"])
        self._has_choice = True
        for name, value in choice.items():
            if name not in ("delta", "message", "index") and value not in (None, ""):
                self._choice[name] = value
        self.is_finished |= bool(choice.get("finish_reason"))

    def body(self) -> dict[str, Any]:
        """What has come, as a body that was not streamed."""
        choice = {"index": 0, "message": self._message.message(), "finish_reason": None} | self._choice
        return self._fields | {"object": "chat.completion", "choices": [choice] if self._has_choice else []}


class JoinedMessage:
    """A message that grows delta by delta."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._content: list[Any] = []
        self._calls = JoinedCalls()
        self._details: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing but a role has come."""
        return not (self._texts or self._fields or any(self._content) or self._calls.entries or self._details)

    def add(self, delta: Mapping[str, Any]) -> None:
        """Take a delta."""
        for name, value in delta.items():
            if name == "role" or value is None:
                continue
            if name == "content":
                self._content += value if isinstance(value, list) else [value]
            elif name == "tool_calls":
                self._calls.add(value if isinstance(value, list) else [value])
            elif name == "reasoning_details" and isinstance(value, list):
                for piece in value:
                    _add_detail(self._details, piece)
            elif isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            else:
                self._fields[name] = _grown(self._fields.get(name), value)

    def message(self) -> dict[str, Any]:
        """What has come, as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": _joined_content(self._content), **self._fields}
        message |= {name: "".join(pieces) for name, pieces in self._texts.items()}
        if self._details:
            message["reasoning_details"] = self._details
        if self._calls.entries:
            message["tool_calls"] = self._calls.entries
        return message


def _grown(known: Any, piece: Any) -> Any:
    """A field with one more piece: texts and lists are continued, mappings too, other values replaced."""
    if isinstance(known, str) and isinstance(piece, str):
        return known + piece
    if isinstance(known, list) and isinstance(piece, list):
        return known + piece
    if isinstance(known, dict) and isinstance(piece, dict):
        return known | {name: _grown(known.get(name), value) for name, value in piece.items() if value is not None}
    return piece


def _joined_content(pieces: Iterable[Any]) -> Any:
    """Content from its pieces: a text, a list of parts where any piece was one, or None where nothing came."""
    pieces = list(pieces)
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces) if pieces else None
    parts: list[Any] = []
    for piece in pieces:
        part = {"type": "text", "text": piece} if isinstance(piece, str) else piece
        last = parts[-1] if parts else None
        if isinstance(part, dict) and isinstance(last, dict) and _continues(last, part):
            parts[-1] = {name: _continued(name, last.get(name), part.get(name)) for name in last | part}
        elif piece != "":
            parts.append(part)
    return parts


def _continues(last: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a part is more of the last one: of its kind, which then was text, and not signed off yet."""
    is_text = part.get("type") in ("text", "thinking", "reasoning")
    return is_text and last.get("type") == part.get("type") and not last.get("signature")


def _continued(name: str, known: Any, piece: Any) -> Any:
    if name in ("text", "thinking", "reasoning") and known is not None and piece is not None:
        return _joined_content([*_as_list(known), *_as_list(piece)])
    return known if piece is None else piece


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _add_detail(details: list[dict[str, Any]], piece: Any) -> None:
    """Continue a reasoning detail, or begin one. A signature ends it; what is encrypted is one piece."""
    if not isinstance(piece, dict):
        return
    candidates = reversed(details[-1:] if piece.get("index") is None else details)
    known = next((detail for detail in candidates if _is_more_of(detail, piece)), None)
    if known is None:
        details.append(dict(piece))
        return
    for name, value in piece.items():
        if name in _DETAIL_TEXTS and isinstance(value, str) and isinstance(known.get(name), str):
            known[name] += value
        elif value is not None:
            known[name] = value


def _is_more_of(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    if any(detail.get(name) != piece.get(name) for name in ("type", "index")):
        return False
    if detail.get("id") and piece.get("id") and detail["id"] != piece["id"]:
        return False
    if detail.get("data") and piece.get("data"):
        return False
    has_text = any(piece.get(name) for name in _DETAIL_TEXTS)
    return not (detail.get("signature") and has_text)


class JoinedCalls:
    """Tool calls that grow piece by piece."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        """As in a message that was not streamed."""
        self._by_index: dict[int, dict[str, Any]] = {}

    def add(self, pieces: Iterable[Any]) -> None:
        """Take the pieces of one delta."""
        for piece in pieces:
            if isinstance(piece, dict):
                self._add(piece)

    def _add(self, piece: Mapping[str, Any]) -> None:
        function = piece.get("function")
        function = function if isinstance(function, dict) else piece
        index = piece.get("index")
        known = self._known(piece, function, index)
        if known is None:
            known = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            self.entries.append(known)
        if isinstance(index, int):
            self._by_index[index] = known
        self._grow(known, piece, function)

    def _known(self, piece: Mapping[str, Any], function: Mapping[str, Any], index: object) -> dict[str, Any] | None:
        """The call that a piece belongs to; None where it begins one."""
        call_id = piece.get("id")
        last = self.entries[-1] if self.entries else None
        same_id = next((entry for entry in self.entries if call_id and entry["id"] == call_id), None)
        same_place = self._by_index.get(index) if isinstance(index, int) else None
        if not function.get("name"):
            # A piece without a name continues the call of its id or place, else whatever was last.
            return same_id or same_place or (last if function.get("arguments") or not call_id else None)
        if same_place is None and isinstance(index, int):
            return None
        known = same_place or same_id
        if known is None:
            return last if last is not None and not last["function"]["name"] else None
        return None if _begins_another(known, call_id, function) else known

    def _grow(self, entry: dict[str, Any], piece: Mapping[str, Any], function: Mapping[str, Any]) -> None:
        for name, value in piece.items():
            if name not in ("index", "id", "type", "function", "name", "arguments") and value is not None:
                entry[name] = value
        entry["id"] = entry["id"] or piece.get("id")
        entry["type"] = piece.get("type") or entry["type"]
        joined = entry["function"]
        name = str(function.get("name") or "")
        if name != joined["name"] and not joined["arguments"]:
            joined["name"] += name
        arguments = function.get("arguments")
        if name and _is_repeat(joined, function):
            return
        if isinstance(arguments, str):
            joined["arguments"] += arguments
        elif arguments is not None:
            joined["arguments"] = orjson.dumps(arguments).decode()


def _begins_another(known: Mapping[str, Any], call_id: object, function: Mapping[str, Any]) -> bool:
    """Whether a piece with a name, though it has the place of a known call, is another call."""
    if call_id and known["id"] and call_id != known["id"]:
        return True
    joined, arguments = known["function"], function.get("arguments")
    if not _is_object(joined["arguments"]) or not arguments:
        return False
    begins = isinstance(arguments, dict) or str(arguments).lstrip().startswith("{")
    return begins and not _is_repeat(joined, function)


def _is_repeat(joined: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    """Whether a piece is a whole call once more, as some servers send at the end."""
    same = joined["name"] == function.get("name") and joined["arguments"] == function.get("arguments")
    return same and _is_object(joined["arguments"])


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False
