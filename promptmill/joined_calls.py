"""The pieces of streamed tool calls -> the calls of a message that was not streamed.

Servers differ in how they send them, and all of this is met with: places that are missing or always 0; ids that are
repeated in each piece, new in each piece, missing or empty; the name in each piece or in several; arguments as an
object; a whole call, or all calls, in one piece.

Invariants
    A new place begins a call, and so does what cannot be more of the call before: no call gets another's arguments.
    Each piece is taken once: what has grown so far is neither copied nor read again for the next one.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from promptmill.tool_calls import ARGUMENT_FIELDS, arguments_of, arguments_text, word

_NO_REST = frozenset({"index", "id", "function", "name", *ARGUMENT_FIELDS})
_SIGN = re.compile(r'\\(?:.|\Z)|["{}]', re.DOTALL)


class JoinedCalls:
    """Tool calls that grow piece by piece."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}

    def add(self, pieces: Iterable[Any]) -> None:
        """Take the pieces of one delta."""
        for piece in pieces:
            if isinstance(piece, dict):
                self._add(_Piece(piece))

    def entries(self) -> list[dict[str, Any]]:
        """As in a message that was not streamed; what never had a function is no call."""
        return [call.entry() for call in self._calls if call.has_function]

    def _add(self, piece: "_Piece") -> None:
        call = self._known(piece)
        if call is None or call.ends_before(piece):
            call = _Call()
            self._calls.append(call)
        if piece.index is not None:
            self._by_index[piece.index] = call
            call.is_placed = True
        if piece.id:
            self._by_id[piece.id] = call
        call.take(piece)

    def _known(self, piece: "_Piece") -> "_Call | None":
        """The call that a piece may belong to; None where it begins one."""
        last = self._calls[-1] if self._calls else None
        same_id = self._by_id.get(piece.id) if piece.id else None
        if piece.index in self._by_index:
            return self._by_index[piece.index]
        if piece.index is None:
            return same_id or (last if not piece.name or (last and not last.name) else None)
        if piece.name:
            return None
        begun = same_id or last
        return begun if begun is not None and not begun.is_placed else None


class _Piece:
    """A piece of a tool call, as it came."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        index = fields.get("index")
        is_flat = "function" not in fields
        inner = fields if is_flat else fields["function"]
        function: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
        self.has_function = isinstance(fields.get("name"), str) if is_flat else isinstance(inner, dict)
        self.index = index if isinstance(index, int) else None
        self.id = word(fields.get("id"))
        self.name = word(function.get("name"))
        self.arguments = arguments_of(function)
        self.rest = {name: value for name, value in fields.items() if name not in _NO_REST and value is not None}

    @property
    def begins_object(self) -> bool:
        """Whether its arguments are, or begin as, those of a whole call."""
        if isinstance(self.arguments, str):
            return self.arguments.lstrip().startswith("{")
        return self.arguments is not None


class _Call:
    """A tool call that grows."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.has_function = False
        self.is_placed = False
        """Whether a piece told its place."""
        self._rest: dict[str, Any] = {"type": "function"}
        self._arguments = _Arguments()

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are complete: no more of them can come."""
        return self._arguments.is_whole

    def ends_before(self, piece: _Piece) -> bool:
        """Whether a piece is of another call, although it has this one's place or id, or neither."""
        is_other_id = bool(piece.id and self.id and piece.id != self.id)
        if piece.name and is_other_id:
            return True
        if not (self.is_whole and piece.begins_object) or self._is_repeated_by(piece):
            return False
        # A text that goes on after its end is saved as the wrong JSON it is; an object would replace what there is.
        is_object_of_another = not isinstance(piece.arguments, str) and not (piece.id and piece.id == self.id)
        return bool(piece.name) or is_other_id or is_object_of_another

    def take(self, piece: _Piece) -> None:
        """Grow by a piece."""
        self._rest |= piece.rest
        self.id = self.id or piece.id
        self.has_function |= piece.has_function
        if not self.name or (piece.name != self.name and self._arguments.are_empty):
            self.name += piece.name
        if not self._is_repeated_by(piece):
            self._arguments.add(piece.arguments)

    def _is_repeated_by(self, piece: _Piece) -> bool:
        """Whether a piece is this call, which is whole, once more, as some servers send at the end."""
        return self.is_whole and piece.name == self.name and self._arguments.equal(piece.arguments)

    def entry(self) -> dict[str, Any]:
        """As in a message that was not streamed."""
        function = {"name": self.name, "arguments": self._arguments.value()}
        return {"id": self.id or None, **self._rest, "function": function}


class _Arguments:
    """A call's arguments: a text that grows, or an object that came at once."""

    def __init__(self) -> None:
        self.is_whole = False
        """Whether they are one complete object, as far as its braces and quotes tell."""
        self._pieces: list[str] = []
        self._length = 0
        self._object: Any = None
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    @property
    def are_empty(self) -> bool:
        """Whether nothing has come yet."""
        return self._object is None and not self._length

    def add(self, arguments: object) -> None:
        """Take what a piece has of them."""
        if arguments is None or arguments == "":
            return
        if not isinstance(arguments, str):
            self._object, self.is_whole = arguments, True
            return
        if self._object is not None:
            # An empty object is where some servers begin.
            begun = "" if self._object == {} else arguments_text(self._object)
            self._object, self.is_whole = None, False
            self._pieces, self._length = [begun], len(begun)
        self._pieces.append(arguments)
        self._length += len(arguments)
        self._follow(arguments)

    def _follow(self, piece: str) -> None:
        sign = ""
        for match in _SIGN.finditer(piece, int(self._is_escaped)):
            sign = match[0]
            if sign == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string and sign in "{}":
                self._depth += 1 if sign == "{" else -1
                self.is_whole |= sign == "}" and self._depth == 0
        self._is_escaped = sign == "\\"

    def equal(self, arguments: object) -> bool:
        """Whether they are these."""
        if not isinstance(arguments, str) or self._object is not None:
            return bool(self._object == arguments)
        return len(arguments) == self._length and "".join(self._pieces) == arguments

    def value(self) -> Any:
        """As in a message that was not streamed."""
        return "".join(self._pieces) if self._object is None else self._object
