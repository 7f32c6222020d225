"""One start of a run: what it asked for, what it put on disk, and what must hold between the two."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.crashes.folders import SavedRows
from tests.crashes.scripts import TURNS, kind_of


@dataclass(frozen=True, slots=True)
class Tally:
    """One start of a run, however it ended."""

    samples: Counter[str]
    """Prompt -> how often the dataset lists it."""
    before: SavedRows
    after: SavedRows
    requests: Counter[str]
    """Prompt -> requests that the server counted."""

    @property
    def begun(self) -> Counter[str]:
        """Prompt -> conversations that were begun, at least."""
        return Counter({prompt: -(-count // TURNS[kind_of(prompt)]) for prompt, count in self.requests.items()})

    @property
    def owed(self) -> Counter[str]:
        """Prompt -> samples without a row that counts, when it started."""
        return self.samples - self.before.done_samples()

    @property
    def added(self) -> Counter[str]:
        """Prompt -> rows put on disk."""
        return self.after.prompts() - self.before.prompts()

    def assert_nothing_lost(
        self, in_flight: int, again: Mapping[str, int] | None = None, dead_workers_prompts: int = 0
    ) -> None:
        """Rows of before are as they were, nothing that had one was asked for, and what was asked for has its row.

        Args:
            in_flight: How many prompts may have been asked for and have no row, since they were in flight at a kill.
            again: Prompt -> samples that may be asked for though they have a row (`--retry`).
            dead_workers_prompts: How many may have been begun twice, since their worker died.
        """
        for name, rows in self.before.by_file.items():
            now = self.after.by_file[name]
            assert now[: len(rows)] == rows, f"{name} has lost rows, or has others"
            assert now == rows or not name.startswith("batch_"), f"{name} is of an earlier start, and was appended to"
        paid_twice = self.begun - self.owed - Counter(again or {})
        assert paid_twice.total() <= dead_workers_prompts, f"asked for though their rows were on disk: {paid_twice}"
        lost = self.begun - self.added
        assert lost.total() <= in_flight + dead_workers_prompts, f"asked for, not in flight, and not on disk: {lost}"
        assert not self.added - self.begun, "rows that nobody has asked for"
        doubled = [row for row, times in Counter(map(_attempt, self.after.done)).items() if times > 1]
        assert not doubled, f"two rows of one attempt: {doubled}"

    def assert_complete(self) -> None:
        """It ran to its end: each sample that was owed was asked for, once, and has its row."""
        expected = Counter({prompt: count * TURNS[kind_of(prompt)] for prompt, count in self.owed.items()})
        assert self.requests == expected, f"more: {self.requests - expected}; fewer: {expected - self.requests}"
        assert self.added == self.owed


def _attempt(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["content_hash"], row["occurrence"], row["attempt"]
