"""What the rows of a run folder are known by: about fifty bytes a row and never a text, so that a million rows fit.

Rows are numbered in the order in which they are read. Files that grow may be read again: reading goes on where it
stopped.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from promptmill.dataset import HASH_BYTES, identity_key
from promptmill.errors import OUTCOME_POLICY, Outcome
from promptmill.filters import Rule, ending_when_kept, merge_rules, reason_to_leave_out
from promptmill.records import RowSummary
from promptmill.rows import decoded_row, summarise
from promptmill.shards import read_lines_from

_MOST = 2**32 - 1
"""What a number is cut to, so that it fits its array."""


class Kind(IntEnum):
    """How a row ended, as far as a resume is concerned."""

    COMPLETED = 0
    PARTIAL = 1
    DISCARDED = 2
    FILTERED = 3
    FAILED = 4
    INTERRUPTED = 5
    """No ending at all: the sample is pending."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Says of which kind a row is."""

    known_tools: tuple[str, ...]
    keep_no_reasoning: bool
    rules: tuple[Rule, ...] = field(init=False)
    """The rules by which the merge leaves rows out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", merge_rules(keep_no_reasoning=self.keep_no_reasoning))

    def kind_of(self, summary: RowSummary) -> Kind:
        """The kind that the merge will count a row under."""
        outcome = summary.outcome
        if not OUTCOME_POLICY[outcome].done:
            return Kind.FAILED if OUTCOME_POLICY[outcome].is_failure else Kind.INTERRUPTED
        if outcome is Outcome.DISCARDED and self.keep_no_reasoning:
            outcome = ending_when_kept(summary.stop_reason)
        reason = reason_to_leave_out(summary, self.rules, self.known_tools)
        if outcome is Outcome.DISCARDED or reason == "no_reasoning":
            return Kind.DISCARDED
        if reason:
            return Kind.FILTERED
        return Kind.COMPLETED if outcome is Outcome.COMPLETED else Kind.PARTIAL


@dataclass(slots=True)
class RowIndex:
    """Identity and kind of every row that was read."""

    judge: Judge
    since: str = ""
    """Rows with this timestamp or a later one are `recent`; empty for none."""
    kinds: bytearray = field(default_factory=bytearray)
    recent: bytearray = field(default_factory=bytearray)
    attempts: "array[int]" = field(default_factory=lambda: array("I"))
    _hashes: bytearray = field(default_factory=bytearray)
    """Content hashes; zeros for a row of another program."""
    _texts: bytearray = field(default_factory=bytearray)
    """Digests of prompt, image and cwd; for a row of another program, of the prompt alone."""
    _occurrences: "array[int]" = field(default_factory=lambda: array("I"))
    _spans: list[tuple[Path, int]] = field(default_factory=list)
    """Files in the order read, and the number of the first row of each reading."""
    _read_to: dict[Path, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kinds)

    def read(
        self,
        files: Iterable[Path],
        advance: Callable[[int], None],
        take: Callable[[RowSummary], None] = lambda _summary: None,
    ) -> None:
        """Read rows that were not read before. What is no row is passed over.

        Args:
            files: Shards, `discarded.jsonl` and `failed.jsonl`.
            advance: Told the bytes read, for a progress bar.
            take: Told each row's summary.

        Raises:
            StorageError: a file cannot be read.
        """
        for path in files:
            self._spans.append((path, len(self)))
            for line, end in read_lines_from(path, self._read_to.get(path, 0)):
                advance(len(line) + 1)
                self._read_to[path] = end
                row = decoded_row(line)
                if row is not None:
                    summary = summarise(row)
                    self._add(summary)
                    take(summary)

    def _add(self, summary: RowSummary) -> None:
        self.kinds.append(self.judge.kind_of(summary))
        self.recent.append(bool(self.since) and summary.timestamp >= self.since)
        self.attempts.append(_within(summary.attempt))
        self._occurrences.append(_within(summary.occurrence))
        if summary.content_hash:
            self._hashes += bytes.fromhex(summary.content_hash)
            self._texts += digest(summary.prompt, summary.image, summary.cwd)
        else:
            self._hashes += bytes(HASH_BYTES)
            self._texts += digest(summary.prompt)

    def content_hash(self, row: int) -> bytes:
        """A row's content hash; empty for a row of another program."""
        found = bytes(self._hashes[row * HASH_BYTES : (row + 1) * HASH_BYTES])
        return found if any(found) else b""

    def key(self, row: int) -> bytes:
        """What a row's sample is known by (see `identity_key`); empty for a row of another program."""
        found = self.content_hash(row)
        return identity_key(found, self._occurrences[row]) if found else b""

    def text(self, row: int) -> bytes:
        """The digest that a row is matched by when its hash does not help."""
        return bytes(self._texts[row * HASH_BYTES : (row + 1) * HASH_BYTES])

    def by_file(self, values: bytearray) -> dict[Path, bytearray]:
        """One byte a row of the index -> one byte a row of each file, in the file's order."""
        split: dict[Path, bytearray] = {}
        for (path, first), end in zip(self._spans, self._ends(), strict=True):
            split[path] = split.get(path, bytearray()) + values[first:end]
        return split

    def _ends(self) -> Iterator[int]:
        yield from (first for _, first in self._spans[1:])
        if self._spans:
            yield len(self)


def _within(number: int) -> int:
    return number if 0 <= number <= _MOST else max(0, min(number, _MOST))


def digest(*texts: str) -> bytes:
    """One short key for some texts, in order."""
    lengths = ",".join(map(str, map(len, texts)))  # so that no two lists of texts are the same bytes
    whole = f"{lengths}:{''.join(texts)}".encode("utf-8", "surrogatepass")
    return blake2b(whole, digest_size=HASH_BYTES).digest()
