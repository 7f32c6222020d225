"""Finding and replacing text as a model quotes it: exactly first, then with a few careful allowances.

In order, the first that finds anything decides, and two places are never better than none:
    exact          the very text
    line endings   LF in the quotation, CRLF in the file
    characters     typographic quotes, dashes and spaces for the plain ones
    trailing space spaces at the ends of lines
    indentation    all lines shifted by the same indentation

Invariants
    Outside of what is replaced no byte changes: line endings, a missing final newline and undecodable bytes
    stay. Lines that a replacement leaves as quoted keep the file's own spelling of them.
"""

import bisect
import difflib
import heapq
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolsets.base import ToolError
from toolsets.text import shortened

MAX_CANDIDATES = 1_000
"""Places that are looked at for a common shift of indentation; more are as good as ambiguous."""
MAX_HINT_LINES = 20_000
MAX_HINT_CHARS = 200
MAX_COMPARED_LINES = 20
"""What is looked at when nothing was found, to show the nearest lines."""

_PLAIN_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
    }
)
"""One character for one, so that places in the plain text are places in the file's text."""

_WORD = re.compile(r"\w+")
_INDENT = re.compile(r"[ \t]*")


class NotFoundError(ToolError):
    """The quoted text is nowhere in the file."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A text with one quotation replaced."""

    text: str
    count: int
    """How many places were replaced."""
    strategy: str
    """Which allowance found them, as in the module's docstring."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A text as lines and their endings; `"".join` of the pairs is the text."""

    texts: list[str]
    endings: list[str]

    @classmethod
    def of(cls, text: str) -> "Lines":
        """Split at LF and CRLF; the ending of the last line is empty when the text does not end in one."""
        texts, endings = [], []
        for line in text.split("\n"):
            has_cr = line.endswith("\r")
            texts.append(line[:-1] if has_cr else line)
            endings.append("\r\n" if has_cr else "\n")
        if texts[-1] == "" and endings[-1] == "\n":
            texts.pop()
            endings.pop()
        else:
            texts[-1], endings[-1] = text.rpartition("\n")[2], ""
        return cls(texts, endings)

    def join(self) -> str:
        """The text again."""
        return "".join(text + ending for text, ending in zip(self.texts, self.endings, strict=True))

    @property
    def usual_ending(self) -> str:
        """The ending that new lines get."""
        return "\r\n" if self.endings.count("\r\n") > self.endings.count("\n") else "\n"

    def replace(self, start: int, end: int, new: Sequence[str]) -> None:
        """Put `new` in the place of the lines from `start` to before `end`."""
        usual = self.usual_ending
        endings = [*self.endings[start:end][: len(new)]]
        endings += [usual] * (len(new) - len(endings))
        if endings and end == len(self.texts) and start < end:
            endings[-1] = self.endings[-1]  # whether the text ends in a line break is not what is replaced
        endings = [ending or usual for ending in endings[:-1]] + endings[-1:]
        if start == end == len(self.texts) and self.texts and new:
            # Appended: the line that was last needs an ending, and what the text ended in goes to the new
            # last.
            endings[-1], self.endings[-1] = self.endings[-1], self.endings[-1] or usual
        self.texts[start:end] = new
        self.endings[start:end] = endings


@dataclass(frozen=True, slots=True)
class Match:
    """Where quoted lines are in a file."""

    start: int
    end: int
    shift: tuple[str, str] = ("", "")
    """The indentation of the quotation and the file's in its place."""
    strategy: str = "exact"


def replace_text(text: str, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """Replace one quotation, or all places of it.

    Args:
        text: The file.
        old: What to replace, not empty.
        new: What to put there.
        replace_all: Whether several places are all meant.

    Raises:
        NotFoundError: no strategy finds `old`; names the nearest lines.
        ToolError: several places, and not `replace_all`; or nothing would change.
    """
    if not old:
        raise ToolError("old_string is empty; quote the text to replace, or use write_file for a new file")
    if old == new:
        raise ToolError("old_string and new_string are the same; nothing would change")
    is_crlf = text.count("\r\n") * 2 > text.count("\n")
    spellings = [("exact", old, _with_crlf(new) if is_crlf and "\n" not in old else new)]
    if "\r\n" in text and "\n" in old and "\r" not in old:
        spellings.append(("line endings", old.replace("\n", "\r\n"), _with_crlf(new)))
    for strategy, needle, replacement in spellings:
        starts = _places(text, needle)
        if starts:
            _refuse_ambiguity(text, starts, replace_all)
            return Replacement(text.replace(needle, replacement), len(starts), strategy)
    _, needle, replacement = spellings[-1]
    starts = _places(to_plain(text), to_plain(needle))
    if starts:
        _refuse_ambiguity(text, starts, replace_all)
        return Replacement(_replace_folded(text, starts, needle, replacement), len(starts), "characters")
    return _replace_lines(text, old, new, replace_all=replace_all)


def find_lines(lines: Sequence[str], wanted: Sequence[str], first: int = 0) -> list[Match]:
    """Find where `wanted` lines stand together in `lines`, from line `first` on; the first strategy decides.

    Nothing is found of no wanted lines, or of blank ones alone.
    """
    if not any(line.strip() for line in wanted):
        return []
    for strategy, key in _LINE_KEYS:
        starts = _line_places([key(line) for line in lines[first:]], [key(line) for line in wanted])
        matches = [Match(first + start, first + start + len(wanted), strategy=strategy) for start in starts]
        if strategy == "indentation":
            matches = [
                shifted
                for match in matches[:MAX_CANDIDATES]
                if (shifted := _with_shift(lines[match.start : match.end], wanted, match)) is not None
            ]
        if matches:
            return matches
    return []


def adapt_lines(found: Sequence[str], match: Match, old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Write new lines as the file would have them: unchanged ones as found, others with its indentation."""
    head = _common_count(old, new)
    tail = min(_common_count(old[::-1], new[::-1]), min(len(old), len(new)) - head)
    changed = [shift_indent(line, match) for line in new[head : len(new) - tail]]
    return [*found[:head], *changed, *found[len(old) - tail :]]


def shift_indent(line: str, match: Match) -> str:
    """Indent a new line as the file indents the place that was found.

    Raises:
        NotFoundError: it lacks the quotation's indentation, so that how far to shift it would be a guess.
    """
    quoted, meant = match.shift
    if quoted == meant or not line.strip():
        return line
    if not line.startswith(quoted):
        raise NotFoundError(
            f"the quoted lines are indented by {len(quoted)} characters and the file's by {len(meant)}; quote "
            "them with the file's own indentation"
        )
    return meant + line[len(quoted) :]


def to_plain(text: str) -> str:
    """Typographic characters made plain, one for one."""
    return text if text.isascii() else text.translate(_PLAIN_CHARACTERS)


def nearest_lines(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """A sentence that shows the lines most like the first wanted one that is not blank; may be empty."""
    probe = next((line.strip() for line in wanted if line.strip()), "")[:MAX_HINT_CHARS]
    words = set(_WORD.findall(probe))
    number_by_line: dict[str, int] = {}
    for number, line in enumerate(lines[:MAX_HINT_LINES], 1):
        number_by_line.setdefault(line.strip()[:MAX_HINT_CHARS], number)
    # Comparing characters is slow, so only the lines that share the most words are compared.
    shared = {line: len(words.intersection(_WORD.findall(line))) for line in number_by_line}
    candidates = heapq.nlargest(MAX_COMPARED_LINES, (line for line in shared if shared[line]), key=shared.__getitem__)
    nearest = difflib.get_close_matches(probe, candidates, n=2, cutoff=0.6)
    if not nearest:
        return ""
    shown = "; ".join(
        f"line {number_by_line[line]}: {shortened(lines[number_by_line[line] - 1], 200)!r}" for line in nearest
    )
    return f" Nearest: {shown}."


def _common_count(left: Sequence[str], right: Sequence[str]) -> int:
    """How many items two sequences share at their start."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _places(text: str, needle: str) -> list[int]:
    """Where `needle` starts in `text`, without overlap, as `str.replace` counts."""
    starts = []
    start = text.find(needle)
    while start >= 0:
        starts.append(start)
        start = text.find(needle, start + len(needle))
    return starts


def _line_places(keys: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where `wanted` keys follow each other in `keys`, without overlap.

    One substring search over the joined keys: linear, where comparing slices could be made quadratic.
    """
    text, needle = "\n" + "\n".join(keys) + "\n", "\n" + "\n".join(wanted) + "\n"
    offsets = [0]
    for key in keys:
        offsets.append(offsets[-1] + len(key) + 1)
    starts, start = [], text.find(needle)
    while start >= 0:
        starts.append(bisect.bisect_left(offsets, start))
        start = text.find(needle, start + len(needle) - 1)  # the line break between two places belongs to both
    return starts


def _with_crlf(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _indent(line: str) -> str:
    found = _INDENT.match(line)
    return found.group() if found else ""


def _with_shift(found: Sequence[str], wanted: Sequence[str], match: Match) -> Match | None:
    """The match with its shift of indentation, or None when the lines are not all shifted alike."""
    quoted = os.path.commonprefix([_indent(line) for line in wanted if line.strip()])
    meant = os.path.commonprefix([_indent(line) for line in found if line.strip()])
    for file_line, line in zip(found, wanted, strict=True):
        if line.strip() and _indent(file_line) != meant + _indent(line).removeprefix(quoted):
            return None
    return Match(match.start, match.end, (quoted, meant), match.strategy)


def _refuse_ambiguity(text: str, starts: Sequence[int], replace_all: bool) -> None:
    if len(starts) > 1 and not replace_all:
        numbers = [text.count("\n", 0, start) + 1 for start in starts[:10]]
        raise _ambiguous(len(starts), numbers)


def _ambiguous(count: int, line_numbers: Sequence[int]) -> ToolError:
    where = ", ".join(map(str, line_numbers)) + (", ..." if count > len(line_numbers) else "")
    return ToolError(
        f"Found {count} matches for old_string, at lines {where}; quote more lines around the one you mean, "
        "or set replace_all=true"
    )


def _replace_folded(text: str, starts: Sequence[int], old: str, new: str) -> str:
    """Replace places found among plain characters; what old and new share keeps the file's characters."""
    common_head = len(os.path.commonprefix([old, new]))
    room = min(len(old), len(new)) - common_head
    common_tail = min(room, len(os.path.commonprefix([old[::-1], new[::-1]])))
    changed = new[common_head : len(new) - common_tail]
    pieces, done = [], 0
    for start in starts:
        pieces += [text[done : start + common_head], changed]
        done = start + len(old) - common_tail
    return "".join([*pieces, text[done:]])


def _replace_lines(text: str, old: str, new: str, *, replace_all: bool) -> Replacement:
    lines = Lines.of(text)
    old_lines, new_lines = Lines.of(old).texts, Lines.of(new).texts
    if old and not old.endswith("\n") and (new.endswith("\n") or not new):
        new_lines = [
            *new_lines,
            "",
        ]  # exactly as with an exact match, the break after the last old line stays
    matches = find_lines(lines.texts, old_lines)
    if not matches:
        hint = nearest_lines(lines.texts, old_lines)
        raise NotFoundError(f"Could not find a match for old_string in the file.{hint} Read the file again.")
    if len(matches) > 1 and not replace_all:
        raise _ambiguous(len(matches), [match.start + 1 for match in matches[:10]])
    for match in reversed(matches):
        found = lines.texts[match.start : match.end]
        lines.replace(match.start, match.end, adapt_lines(found, match, old_lines, new_lines))
    return Replacement(lines.join(), len(matches), matches[0].strategy)


def _key_plain_end(line: str) -> str:
    return to_plain(line).rstrip()


def _key_plain_strip(line: str) -> str:
    return to_plain(line).strip()


_LINE_KEYS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("exact", str),
    ("characters", to_plain),
    ("trailing space", _key_plain_end),
    ("indentation", _key_plain_strip),
)
"""What of a line counts, strictest first."""
