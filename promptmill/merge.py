"""The files that a run folder's rows make: `trajectories.jsonl` and the statistics, in one pass over the rows.

Both are made from the shards, `discarded.jsonl` and `failed.jsonl` alone, and so can be made again at any time.
Order is the shards' (batch 2 before batch 10), then each shard's own; rows that were discarded and are now kept come
last. Memory does not grow with the run, but for one byte a row where some rows do not count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from promptmill.errors import OUTCOME_POLICY, Outcome
from promptmill.filters import ending_when_kept, merge_rules, reason_to_leave_out
from promptmill.records import RowSummary
from promptmill.resume import Fate
from promptmill.rows import completed_row, decoded_row, has_final_shape, summarise, union_of_tools
from promptmill.shards import read_lines, write_atomic
from promptmill.statistics import RunStatistics


@dataclass(frozen=True, slots=True)
class MergeSources:
    """What is merged, and how."""

    shards: Sequence[Path]
    discarded: Path
    failed: Path
    known_tools: Sequence[str]
    keep_no_reasoning: bool
    fates: Mapping[Path, bytes | bytearray] = field(default_factory=dict)
    """What becomes of each row (`Fate`), by file and in its order; rows beyond what is said here count."""


@dataclass(slots=True)
class MergeResult:
    """What the pass found."""

    statistics: RunStatistics = field(default_factory=RunStatistics)
    tool_names: tuple[str, ...] = ()
    unreadable_lines: int = 0


def _ignore(count: int) -> None:
    del count


def merge(sources: MergeSources, target: Path, *, advance: Callable[[int], None] = _ignore) -> MergeResult:
    """Write `target` whole, and count.

    A row that is no valid JSON trajectory, or that a quality filter leaves out, is not in `target`; it stays in its
    shard. `advance` is told the bytes read, for a progress bar.

    Raises:
        StorageError: the disk refused; the old `target` is then untouched.
    """
    return _passes(sources, lambda lines: write_atomic(target, lines), advance)


def count(sources: MergeSources, *, advance: Callable[[int], None] = _ignore) -> MergeResult:
    """What `merge` would count, without writing anything. Raises StorageError where a file cannot be read."""
    return _passes(sources, _drop, advance)


def _drop(lines: Iterator[bytes]) -> None:
    for _ in lines:
        pass


def _passes(
    sources: MergeSources, consume: Callable[[Iterator[bytes]], None], advance: Callable[[int], None]
) -> MergeResult:
    columns = tuple(sources.known_tools)
    while True:
        merger = _Merger(sources, columns, advance)
        consume(merger.lines())
        if merger.missing_columns <= set(columns):
            break
        # A row of another program knows tools that we do not: once more, with a column for each.
        columns = union_of_tools(columns, merger.missing_columns)
        advance = _ignore
    merger.result.tool_names = columns
    return merger.result


class _Merger:
    """One pass over the rows."""

    def __init__(self, sources: MergeSources, columns: tuple[str, ...], advance: Callable[[int], None]) -> None:
        self.sources = sources
        self.columns = columns
        self.advance = advance
        self.rules = merge_rules(keep_no_reasoning=sources.keep_no_reasoning)
        self.result = MergeResult()
        self.missing_columns: set[str] = set()

    def lines(self) -> Iterator[bytes]:
        """The merged rows, each with its newline; the result is whole when they are through."""
        statistics = self.result.statistics
        for path in (*self.sources.shards, self.sources.discarded, self.sources.failed):
            for line, row, fate in self._rows(path):
                summary = summarise(row)
                if not OUTCOME_POLICY[summary.outcome].done:
                    statistics.add_failed(summary, counts=fate == Fate.COUNTS)
                elif fate != Fate.COUNTS:
                    statistics.add_left_behind(summary, superseded=fate == Fate.SUPERSEDED)
                elif merged := self._merged(line, row, summary):
                    yield merged

    def _merged(self, line: bytes, row: dict[str, Any], summary: RowSummary) -> bytes:
        """Count a row; returns its line of `trajectories.jsonl`, empty where a filter leaves it out."""
        if self.sources.keep_no_reasoning and row.get("outcome") == Outcome.DISCARDED:
            row, line = as_kept(row), b""
            summary = summarise(row)
        reason = reason_to_leave_out(summary, self.rules, self.sources.known_tools)
        merged = None if reason else self._merged_line(line if summary.is_ours else b"", row)
        if merged is None and not reason:
            self.result.unreadable_lines += 1
            return b""
        self.result.statistics.add(summary, reason)
        return merged + b"\n" if merged is not None else b""

    def _rows(self, path: Path) -> Iterator[tuple[bytes, dict[str, Any], int]]:
        """Each row of a file, as its line and decoded, with its fate."""
        fates = self.sources.fates.get(path, b"")
        number = 0
        for line in read_lines(path):
            self.advance(len(line) + 1)
            row = decoded_row(line)
            if row is None:
                self.result.unreadable_lines += 1
                continue
            yield line, row, fates[number] if number < len(fates) else Fate.COUNTS
            number += 1

    def _merged_line(self, line: bytes, row: dict[str, Any]) -> bytes | None:
        """The row with every key and every tool's column; None when another program nested it beyond all bounds."""
        if line and has_final_shape(row, self.columns):
            return line
        stats = row.get("tool_stats")
        self.missing_columns.update(stats if isinstance(stats, dict) else ())
        try:
            return orjson.dumps(completed_row(row, self.columns))
        except TypeError:
            return None


def as_kept(row: dict[str, Any]) -> dict[str, Any]:
    """A discarded row as if it had never been."""
    return row | {"outcome": str(ending_when_kept(str(row.get("stop_reason")))), "error": ""}
