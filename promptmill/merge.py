"""The files that a run folder's rows make: `trajectories.jsonl` and the statistics, in one pass over the rows.

Both are made from the shards, `discarded.jsonl` and `failed.jsonl` alone, and so can be made again at any time.
Order is the shards' (batch 2 before batch 10), then each shard's own; rows that were discarded and are now kept come
last. Memory does not grow with the run, but for the identities of failed samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from promptmill.errors import Outcome
from promptmill.filters import merge_rules, reason_to_leave_out
from promptmill.records import RowSummary
from promptmill.resume import identity_of
from promptmill.rows import completed_row, decoded_row, summarise, union_of_tools
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
        open_failures = self._failures()
        for path in (*self.sources.shards, self.sources.discarded):
            for row in self._rows(path):
                if self.sources.keep_no_reasoning:
                    row = as_kept(row)
                summary = summarise(row)
                if summary.content_hash:
                    open_failures.pop(identity_of(summary), None)
                reason = reason_to_leave_out(summary, self.rules, self.sources.known_tools)
                merged = None if reason else self._merged_line(row)
                if merged is None and not reason:
                    self.result.unreadable_lines += 1
                    continue
                self.result.statistics.add(summary, reason)
                if merged is not None:
                    yield merged + b"\n"
        for summary in open_failures.values():
            self.result.statistics.add_failed(summary)

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        for line in read_lines(path):
            self.advance(len(line) + 1)
            row = decoded_row(line)
            if row is None:
                self.result.unreadable_lines += 1
            else:
                yield row

    def _failures(self) -> dict[tuple[bytes, int], RowSummary]:
        """The last failed attempt of each sample, all attempts counted."""
        last_attempt: dict[tuple[bytes, int], RowSummary] = {}
        for row in self._rows(self.sources.failed):
            summary = summarise(row)
            self.result.statistics.add_attempt(summary)
            if summary.content_hash:
                last_attempt[identity_of(summary)] = summary
        return last_attempt

    def _merged_line(self, row: dict[str, Any]) -> bytes | None:
        """The row with every key and every tool's column; None when another program nested it beyond all bounds."""
        stats = row.get("tool_stats")
        self.missing_columns.update(stats if isinstance(stats, dict) else ())
        try:
            return orjson.dumps(completed_row(row, self.columns))
        except TypeError:
            return None


def as_kept(row: dict[str, Any]) -> dict[str, Any]:
    """A row as if it had never been discarded."""
    if row.get("outcome") != Outcome.DISCARDED:
        return row
    outcome = Outcome.COMPLETED if row.get("completed") else Outcome.PARTIAL
    return row | {"outcome": str(outcome), "error": ""}
