"""Patches in the V4A format, which many models are trained to write.

    *** Begin Patch
    *** Add File: notes.txt
    +text
    *** Update File: app.py
    *** Move to: main.py
    @@ def greet():
     context
    -old
    +new
    *** Delete File: old.py
    *** Move File: a.py -> b.py
    *** End Patch

Source: the format's description in OpenAI's GPT-4.1 prompting guide; `Move File` is what hermes-agent adds
to it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolsets.base import ToolError
from toolsets.edits import Lines, Match, NotFoundError, find_lines, nearest_lines, shift_indent, to_plain
from toolsets.text import shortened

_HEADER = re.compile(r"\*\*\* (Add File|Update File|Delete File|Move File|Move to): *+(.*[^ ]) *")
_NUMBERS = re.compile(r"-\d+(,\d+)? \+\d+(,\d+)?")
"""Line numbers after `@@`, as unified diffs have them; they are not to be relied on, so they are no hint."""


@dataclass(slots=True)
class Hunk:
    """One change of a file: lines that stay, go and come."""

    number: int
    """Line of the patch where it starts, for errors."""
    hints: list[str] = field(default_factory=list)
    """Lines that stand, in this order, somewhere above the change."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a mark (space, `-` or `+`) and a line."""
    is_at_end: bool = False

    def drop_blank_end(self) -> None:
        """Forget wholly empty lines at the end: they part one section of the patch from the next."""
        while self.lines and self.lines[-1] == ("", ""):
            self.lines.pop()
        self.lines = [(mark or " ", line) for mark, line in self.lines]


@dataclass(slots=True)
class Operation:
    """What a patch does to one file."""

    kind: Literal["Add", "Update", "Delete", "Move"]
    path: str
    new_path: str = ""
    """Where a moved file goes; an update may move as well."""
    text: str = ""
    """Content of an added file."""
    hunks: list[Hunk] = field(default_factory=list)


def parse_patch(patch: str) -> list[Operation]:
    """Read a patch.

    Raises:
        ToolError: names the line that cannot be read.
    """
    operations: list[Operation] = []
    for number, line in _body(patch):
        header = _HEADER.fullmatch(line)
        if header:
            _start(operations, header[1], header[2], number)
        elif not operations:
            if line.strip():
                raise ToolError(
                    f"patch line {number}: expected a line such as *** Update File: path, not {shortened(line, 80)!r}"
                )
        elif operations[-1].kind == "Add":
            _add_line(operations[-1], line, number)
        elif operations[-1].kind == "Update":
            _hunk_line(operations[-1], line, number)
        elif line.strip():
            raise ToolError(
                f"patch line {number}: nothing can follow *** {operations[-1].kind} File, not {shortened(line, 80)!r}"
            )
    if not operations:
        raise ToolError("the patch names no file; each part begins with a line such as *** Update File: path")
    for operation in operations:
        for hunk in operation.hunks:
            hunk.drop_blank_end()
        operation.hunks = [hunk for hunk in operation.hunks if hunk.lines]
        if operation.kind == "Update" and not operation.hunks and not operation.new_path:
            raise ToolError(f"*** Update File: {operation.path} changes nothing")
    return operations


def apply_hunks(text: str, hunks: Sequence[Hunk], shown_path: str) -> str:
    """Apply the hunks of one file to its text.

    Raises:
        ToolError: the lines of a hunk are not in the file, or in several places with no hint to choose by.
    """
    lines = Lines.of(text)
    first = 0
    for hunk in hunks:
        hinted = _after_hints(lines.texts, hunk, first)
        old = [line for mark, line in hunk.lines if mark != "+"]
        if not old:
            if hunk.hints and hinted is None:
                raise NotFoundError(
                    f"{shown_path}: no line {shortened(hunk.hints[-1], 80)!r} (patch line {hunk.number})."
                )
            new = [line for _, line in hunk.lines]
            start = len(lines.texts) if hinted is None else hinted + 1
            lines.replace(start, start, new)
            first = start + len(new)
            continue
        match = _place(lines.texts, old, hunk, (first, hinted), shown_path)
        first = _rewrite(lines, match, hunk)
    return lines.join()


def _body(patch: str) -> Iterator[tuple[int, str]]:
    """The numbered lines between the frame's; the frame may be missing."""
    for number, raw_line in enumerate(patch.split("\n"), 1):
        line = raw_line.removesuffix("\r")
        if line.rstrip() == "*** End Patch":
            return
        if line.rstrip() != "*** Begin Patch":
            yield number, line


def _start(operations: list[Operation], verb: str, path: str, number: int) -> None:
    if verb == "Move to":
        if not operations or operations[-1].kind != "Update" or operations[-1].hunks:
            raise ToolError(f"patch line {number}: *** Move to must follow *** Update File directly")
        operations[-1].new_path = path
    elif verb == "Move File":
        source, arrow, target = path.partition(" -> ")
        if not arrow:
            raise ToolError(f"patch line {number}: write *** Move File: old/path -> new/path")
        operations.append(Operation("Move", source.strip(), target.strip()))
    elif verb == "Add File":
        operations.append(Operation("Add", path))
    elif verb == "Delete File":
        operations.append(Operation("Delete", path))
    else:
        operations.append(Operation("Update", path))


def _add_line(operation: Operation, line: str, number: int) -> None:
    if line.startswith("+"):
        operation.text += line[1:] + "\n"
    elif line.strip():
        raise ToolError(f"patch line {number}: each line of an added file begins with +, not {shortened(line, 80)!r}")


def _hunk_line(operation: Operation, line: str, number: int) -> None:
    hunks = operation.hunks
    if line.startswith("@@"):
        if not hunks or hunks[-1].lines:
            hunks.append(Hunk(number))
        hint = line[2:].strip().removesuffix("@@").strip()
        hint = _NUMBERS.sub("", hint, count=1).removeprefix("@@").strip() if _NUMBERS.match(hint) else hint
        if hint:
            hunks[-1].hints.append(hint)
        return
    if not hunks:
        if not line.strip():
            return
        hunks.append(Hunk(number))
    if line.rstrip() == "*** End of File":
        hunks[-1].is_at_end = True
    elif line[:1] in (" ", "-", "+"):
        hunks[-1].lines.append((line[0], line[1:]))
    elif not line:
        hunks[-1].lines.append(("", ""))
    else:
        raise ToolError(
            f"patch line {number}: a line of a change begins with a space, - or +, or is an @@ line, "
            f"not {shortened(line, 80)!r}"
        )


def _after_hints(lines: Sequence[str], hunk: Hunk, first: int) -> int | None:
    """The line of the last hint, or None when there are no hints or one of them is nowhere."""
    found = None
    for hint in hunk.hints:
        at = first if found is None else found + 1
        candidates = [(i, to_plain(lines[i]).strip()) for i in range(at, len(lines))]
        wanted = to_plain(hint)
        whole = (i for i, line in candidates if line == wanted)
        found = next(whole, next((i for i, line in candidates if wanted in line), None))
        if found is None:
            return None
    return found


def _place(
    lines: Sequence[str], old: Sequence[str], hunk: Hunk, start: tuple[int, int | None], shown_path: str
) -> Match:
    """Choose where a hunk applies: below its hint, else the one place after the hunk before, else in the file."""
    first, hinted = start
    name = f"{shown_path}: the change at patch line {hunk.number}"
    matches = find_lines(lines, old, first if hinted is None else hinted) or find_lines(lines, old)
    if hunk.is_at_end:
        matches = [match for match in matches if match.end == len(lines)]
    if not matches:
        raise NotFoundError(f"{name} does not fit: its lines are not in the file.{nearest_lines(lines, old)}")
    if len(matches) > 1 and hinted is None:
        numbers = ", ".join(str(match.start + 1) for match in matches[:10])
        raise ToolError(
            f"{name} fits {len(matches)} places, at lines {numbers}; add lines around it, or an @@ line that "
            "stands above the one you mean"
        )
    return matches[0]


def _rewrite(lines: Lines, match: Match, hunk: Hunk) -> int:
    """Carry out one hunk, leaving the lines that stay untouched; returns the line after it."""
    changes: list[tuple[int, int, list[str]]] = []
    position = match.start
    is_open = False
    for mark, line in hunk.lines:
        if mark == " ":
            position += 1
            is_open = False
            continue
        if not is_open:
            changes.append((position, position, []))
            is_open = True
        start, end, new = changes[-1]
        if mark == "-":
            position += 1
            changes[-1] = (start, end + 1, new)
        else:
            new.append(shift_indent(line, match))
    for start, end, new in reversed(changes):
        lines.replace(start, end, new)
    return match.end + sum(len(new) - (end - start) for start, end, new in changes)
