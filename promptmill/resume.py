"""Which rows count, and what is owed.

A sample is known by its content, never by its index: rows may be reordered, edited or added between two starts, and a
prompt listed three times is owed three trajectories. Matching is counted, from exact to loose:

    1. content hash of the whole dataset row, and occurrence
    2. content hash alone
    3. prompt, image and cwd (a further column was edited)
    4. the prompt's text, for rows of other programs, which have no hash

Of several rows of one sample the latest attempt counts, and the others are superseded; but a failed attempt never
takes the place of a row that is done. Rows of samples that are not in the dataset (any more) stay where they are and
count for nothing.
"""

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from promptmill.budget import Spent
from promptmill.dataset import Dataset
from promptmill.errors import Outcome
from promptmill.records import RowSummary, Usage
from promptmill.row_index import Kind, RowIndex, digest

NO_ROW = -1
MOST_TOLD_BATCHES = 10**9
"""A row that tells of a batch beyond has its number from elsewhere."""


class Fate(IntEnum):
    """What becomes of a row in the merge."""

    COUNTS = 0
    SUPERSEDED = 1
    NOT_IN_DATASET = 2


@dataclass(slots=True)
class Totals:
    """What the rows of a run folder add up to."""

    endings: Counter[tuple[int, Outcome]] = field(default_factory=Counter)
    """How many samples of each batch ended how."""
    spent: Spent = field(default_factory=Spent)

    price: Callable[[Usage], Usage] = lambda usage: usage
    """Gives a usage its cost, where the row does not know it and there is a price now."""

    def add(self, summary: RowSummary) -> None:
        """Count a row."""
        self.endings[summary.batch_number, summary.outcome] += 1
        priced = self.price(summary.usage)
        self.spent.add(summary if priced is summary.usage else replace(summary, usage=priced))

    def highest_batch(self, named: Iterable[int]) -> int:
        """The highest batch number in use, by rows and by the names of shards; -1 when there is none.

        A number in a row that no shard of ours could have is not taken for one.
        """
        told = (number for number, _ in self.endings if number < MOST_TOLD_BATCHES)
        return max((-1, *told, *named))


class Selection:
    """The rows of an index matched with the samples of a dataset."""

    def __init__(self, index: RowIndex, samples: int) -> None:
        self._index = index
        self.row_of: array[int] = array("q", [NO_ROW]) * samples
        """The row that counts of each sample, or NO_ROW."""
        self.fates = bytearray([Fate.NOT_IN_DATASET]) * len(index)
        """What becomes of each row."""
        self.tries: Counter[bytes] = Counter()
        """How often each identity was tried without a row that is done."""

    def take(self, sample: int, row: int) -> None:
        """Let a row count for a sample."""
        self.row_of[sample] = row
        self.fates[row] = Fate.COUNTS

    def kind(self, sample: int) -> Kind | None:
        """How a sample ended; None when it is pending."""
        row = self.row_of[sample]
        return None if row == NO_ROW else Kind(self._index.kinds[row])

    def is_recent(self, sample: int) -> bool:
        """Whether a sample's row was made since `RowIndex.since`."""
        row = self.row_of[sample]
        return row != NO_ROW and bool(self._index.recent[row])

    def done(self) -> bytearray:
        """One byte a sample, 1 for done."""
        kinds = self._index.kinds
        return bytearray(row != NO_ROW and kinds[row] != Kind.FAILED for row in self.row_of)

    def attempts_before(self, sample: int, key: bytes) -> int:
        """How often a sample was tried before."""
        row = self.row_of[sample]
        same = row != NO_ROW and self._index.key(row) == key
        return max(self.tries[key], self._index.attempts[row] if same else 0)

    def fates_by_file(self) -> dict[Path, bytearray]:
        """What becomes of each row, by file and in its order."""
        return self._index.by_file(self.fates)

    def not_in_dataset(self) -> int:
        """How many rows, failed attempts included, are of samples that the dataset does not have."""
        return self.fates.count(Fate.NOT_IN_DATASET)

    def counting(self) -> int:
        """How many rows count."""
        return self.fates.count(Fate.COUNTS)


def select(dataset: Dataset | None, index: RowIndex) -> Selection:
    """Match rows with samples; without a dataset, every row that is not superseded counts."""
    selection = Selection(index, 0 if dataset is None else len(dataset))
    rows = _Contest(index, selection)
    if dataset is None:
        rows.count_all()
        return selection
    rows.match_exactly(dataset)
    rows.match_by_hash(dataset)
    rows.match_by_text(dataset)
    rows.match_failures(dataset)
    return selection


class _Contest:
    """Rows that no sample has taken yet. Each matching takes from what the one before it left."""

    def __init__(self, index: RowIndex, selection: Selection) -> None:
        self.index = index
        self.selection = selection
        self.done: dict[bytes, int] = {}
        """Identity -> the row of its latest attempt."""
        self.spare: list[int] = []
        """Rows whose identity another row of the same attempt has (two runs in one folder, say)."""
        self.failed: dict[bytes, int] = {}
        self.foreign: list[int] = []
        for row, kind in enumerate(index.kinds):
            key = index.key(row)
            if kind == Kind.INTERRUPTED:
                self._count_try(key, row)
                selection.fates[row] = Fate.SUPERSEDED
            elif kind == Kind.FAILED:
                self._add_failed(key, row)
            elif key:
                self._add_done(key, row)
            else:
                self.foreign.append(row)

    def _add_done(self, key: bytes, row: int) -> None:
        other = self.done.setdefault(key, row)
        if other == row:
            return
        attempts = self.index.attempts
        if attempts[row] == attempts[other]:
            self.spare.append(row)
            return
        older, newer = sorted((row, other), key=lambda one: attempts[one])
        self.done[key] = newer
        self.selection.fates[older] = Fate.SUPERSEDED

    def _add_failed(self, key: bytes, row: int) -> None:
        if not key:
            self.selection.fates[row] = Fate.SUPERSEDED
            return
        self._count_try(key, row)
        if key in self.failed:
            self.selection.fates[self.failed[key]] = Fate.SUPERSEDED
        self.failed[key] = row

    def _count_try(self, key: bytes, row: int) -> None:
        tries = self.selection.tries
        tries[key] = max(tries[key] + 1, self.index.attempts[row])

    def count_all(self) -> None:
        """Let all count that are not superseded."""
        for row in (*self.done.values(), *self.spare, *self.foreign):
            self.selection.fates[row] = Fate.COUNTS
        for key, row in self.failed.items():
            self.selection.fates[row] = Fate.SUPERSEDED if key in self.done else Fate.COUNTS

    def match_exactly(self, dataset: Dataset) -> None:
        """By content hash and occurrence."""
        if not self.done:
            return
        for sample in range(len(dataset)):
            row = self.done.pop(dataset.key(sample), NO_ROW)
            if row != NO_ROW:
                self.selection.take(sample, row)

    def match_by_hash(self, dataset: Dataset) -> None:
        """By content hash alone."""
        left = sorted((*self.done.values(), *self.spare))
        self._match(left, self.index.content_hash, dataset.content_hash)

    def match_by_text(self, dataset: Dataset) -> None:
        """By prompt, image and cwd; then, for rows of other programs, by the prompt."""
        fates = self.selection.fates
        left = [row for row in sorted((*self.done.values(), *self.spare)) if fates[row] == Fate.NOT_IN_DATASET]

        def content(sample: int) -> bytes:
            full = dataset.sample(sample)
            return digest(full.prompt, full.image, full.cwd)

        self._match(left, self.index.text, content)
        self._match(self.foreign, self.index.text, lambda sample: digest(dataset.sample(sample).prompt))

    def _match(
        self,
        rows: Sequence[int],
        key_of_row: Callable[[int], bytes],
        key_of_sample: Callable[[int], bytes],
    ) -> None:
        """Give each sample that has no row yet the first of the rows with its key."""
        if not rows:
            return
        waiting: dict[bytes, deque[int]] = defaultdict(deque)
        for row in rows:
            waiting[key_of_row(row)].append(row)
        for sample, taken in enumerate(self.selection.row_of):
            if taken == NO_ROW and (queue := waiting.get(key_of_sample(sample))):
                self.selection.take(sample, queue.popleft())

    def match_failures(self, dataset: Dataset) -> None:
        """What is not done may have failed; what is done has left its failures behind."""
        if not self.failed:
            return
        for sample in range(len(dataset)):
            row = self.failed.pop(dataset.key(sample), NO_ROW)
            if row == NO_ROW:
                continue
            if self.selection.row_of[sample] == NO_ROW:
                self.selection.take(sample, row)
            else:
                self.selection.fates[row] = Fate.SUPERSEDED
