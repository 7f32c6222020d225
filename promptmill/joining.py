"""The pieces of a streamed chat completion -> the body that it has without streaming.

Each piece is taken once: what has grown so far is never copied for the next one.

Source: https://platform.openai.com/docs/api-reference/chat-streaming,
https://openrouter.ai/docs/use-cases/reasoning-tokens (pieces of `reasoning_details`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from promptmill.joined_calls import JoinedCalls
from promptmill.reasoning import DETAIL_FIELDS
from promptmill.tool_calls import word

_DETAIL_TEXTS = ("text", "summary", "data", "thinking", "content")
"""Fields of a reasoning detail that grow piece by piece; the others, the signature among them, come once."""
_PART_TEXTS = ("text", "thinking", "reasoning")


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
        self._has_message = False

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
            if isinstance(choice, dict) and not (isinstance(index := choice.get("index"), int) and index):
                self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        delta, message = choice.get("delta"), choice.get("message")
        if isinstance(delta, dict):
            self._message.add(delta)
        elif isinstance(message, dict) and self._message.is_empty:
            self._message.add(message)
        self._has_message |= isinstance(delta, dict) or isinstance(message, dict)
        for name, value in choice.items():
            if name not in ("delta", "message", "index") and value not in (None, ""):
                self._choice[name] = value
        self.is_finished |= bool(choice.get("finish_reason"))

    def body(self) -> dict[str, Any]:
        """What has come, as a body that was not streamed."""
        choice = {"index": 0, "message": self._message.message(), "finish_reason": None} | self._choice
        return self._fields | {"object": "chat.completion", "choices": [choice] if self._has_message else []}


class JoinedMessage:
    """A message that grows delta by delta."""

    def __init__(self) -> None:
        self.is_empty = True
        """Whether nothing but a role has come."""
        self._fields: dict[str, Any] = {}
        self._content: list[Any] = []
        self._beginnings: set[int] = set()
        """Places in the content of parts that came together with one before them, and so are no more of it."""
        self._calls = JoinedCalls()
        self._details: dict[str, JoinedDetails] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Take a delta."""
        for name, value in delta.items():
            if name == "role" or value is None:
                continue
            self.is_empty = self.is_empty and not value
            if name == "content":
                pieces = value if isinstance(value, list) else [value]
                self._beginnings.update(range(len(self._content) + 1, len(self._content) + len(pieces)))
                self._content += pieces
            elif name == "tool_calls":
                self._calls.add(value if isinstance(value, list) else [value])
            elif name in DETAIL_FIELDS and isinstance(value, list):
                self._details.setdefault(name, JoinedDetails()).add(value)
            else:
                self._fields[name] = _grown(self._fields.get(name), value)

    def message(self) -> dict[str, Any]:
        """What has come, as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": _joined_content(self._content, self._beginnings)}
        message |= {name: _settled(value) for name, value in self._fields.items()}
        message |= {name: details.entries() for name, details in self._details.items()}
        if calls := self._calls.entries():
            message["tool_calls"] = calls
        return message


class _Text:
    """A text that grows piece by piece."""

    def __init__(self, piece: str) -> None:
        self.pieces = [piece]


def _grown(known: Any, piece: Any) -> Any:
    """A field with one more piece: texts, lists and mappings are continued, other values replaced."""
    if isinstance(piece, str):
        if not isinstance(known, _Text):
            return _Text(piece)
        known.pieces.append(piece)
        return known
    if isinstance(piece, list):
        known = known if isinstance(known, list) else []
        known += piece
        return known
    if isinstance(piece, dict):
        known = known if isinstance(known, dict) else {}
        for name, value in piece.items():
            if value is not None or name not in known:
                known[name] = _grown(known.get(name), value)
        return known
    return piece


def _settled(value: Any) -> Any:
    """A field that grows no more."""
    if isinstance(value, _Text):
        return "".join(value.pieces)
    return {name: _settled(part) for name, part in value.items()} if isinstance(value, dict) else value


def _joined_content(pieces: Sequence[Any], beginnings: Collection[int] = ()) -> Any:
    """Content from its pieces: a text, a list of parts where any piece was one, or None where nothing came."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces) if pieces else None
    parts: list[Any] = []
    for place, piece in enumerate(pieces):
        part = {"type": "text", "text": piece} if isinstance(piece, str) else piece
        last = parts[-1] if parts else None
        may_go_on = isinstance(part, dict) and place not in beginnings
        if may_go_on and isinstance(last, _Part) and last.goes_on_with(part):
            last.add(part)
        elif piece != "":
            parts.append(_Part(part) if isinstance(part, dict) else part)
    return [part.joined() if isinstance(part, _Part) else part for part in parts]


class _Part:
    """A part of the content that grows piece by piece."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._fields: dict[str, Any] = {}
        self._texts: dict[str, list[Any]] = {}
        for name, value in part.items():
            if name in _PART_TEXTS and value is not None:
                self._texts[name] = [value]
            self._fields[name] = value

    def goes_on_with(self, part: Mapping[str, Any]) -> bool:
        """Whether a part is more of this one: of its kind, which then is text, and this is not signed off yet."""
        is_text = part.get("type") in ("text", "thinking", "reasoning")
        is_text = is_text and all(isinstance(part.get(name), str | list | None) for name in _PART_TEXTS)
        return is_text and self._fields.get("type") == part.get("type") and not self._fields.get("signature")

    def add(self, part: Mapping[str, Any]) -> None:
        for name, value in part.items():
            if name in _PART_TEXTS and value is not None:
                self._texts.setdefault(name, []).append(value)
            if value is not None or name not in self._fields:
                self._fields[name] = value

    def joined(self) -> dict[str, Any]:
        return self._fields | {name: _joined_values(values) for name, values in self._texts.items()}


def _joined_values(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    return _joined_content([piece for value in values for piece in (value if isinstance(value, list) else [value])])


class JoinedDetails:
    """Reasoning details that grow piece by piece. A signature ends one; what is encrypted is one piece."""

    def __init__(self) -> None:
        self._details: list[dict[str, Any]] = []
        self._by_place: dict[tuple[str, Any], dict[str, Any]] = {}
        """By type and index, the last that has both."""

    def add(self, pieces: Iterable[Any]) -> None:
        """Take the pieces of one delta."""
        latest = self._details[-1] if self._details else None
        for piece in pieces:
            if isinstance(piece, dict):
                self._add(piece, latest)
                latest = None  # several that came together are several, where they do not say their places

    def _add(self, piece: Mapping[str, Any], latest: dict[str, Any] | None) -> None:
        place = (word(piece.get("type")), piece.get("index"))
        known = self._by_place.get(place) if isinstance(place[1], int) else latest
        if known is None or not _is_more_of(known, piece):
            known = {}
            self._details.append(known)
        if isinstance(place[1], int):
            self._by_place[place] = known
        for name, value in piece.items():
            if name in _DETAIL_TEXTS and isinstance(value, str):
                known[name] = _grown(known.get(name), value)
            elif value is not None or name not in known:
                known[name] = value

    def entries(self) -> list[dict[str, Any]]:
        """As in a message that was not streamed."""
        return [_settled(detail) for detail in self._details]


def _is_more_of(detail: Mapping[str, Any], piece: Mapping[str, Any]) -> bool:
    if any(detail.get(name) != piece.get(name) for name in ("type", "index")):
        return False
    if detail.get("id") and piece.get("id") and detail["id"] != piece["id"]:
        return False
    if detail.get("data") and piece.get("data"):
        return False
    has_text = any(piece.get(name) for name in _DETAIL_TEXTS)
    return not (detail.get("signature") and has_text)
