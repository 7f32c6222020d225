"""One run in a folder of its own, started again and again until it is through."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tests.crashes.folders import assert_derived_files_are_whole, derived_files, prompt_of, saved_rows
from tests.crashes.harness import DONE, KILLED, STOPPED, Forked, Harness, Stop
from tests.crashes.scripts import base_url, counts
from tests.crashes.tallies import Tally
from tests.rows import write_dataset

PROMPTS = (
    "plain one", "tools two", "discarded three", "plain twice", "partial five", "failed six", "plain twice",
    "filtered eight",
)  # fmt: skip
IN_FLIGHT = 2
"""As many prompts as workers (`harness.OPTIONS`)."""


class Case:
    """A run, its dataset, and what each start of it asked for."""

    def __init__(self, harness: Harness, folder: Path, prompts: Sequence[str | Mapping[str, Any]] = PROMPTS) -> None:
        self.harness = harness
        self.folder = folder
        self.run = folder / "data" / "run"
        self.name = f"{folder.parent.name}-{folder.name}"
        self.starts = 0
        folder.mkdir(exist_ok=True)
        self.set_dataset(prompts)

    def set_dataset(self, rows: Sequence[str | Mapping[str, Any]]) -> None:
        """Write the dataset as it is from now on."""
        write_dataset(self.folder, rows)
        self.samples = Counter(row if isinstance(row, str) else str(row["prompt"]) for row in rows)

    def start(
        self,
        stop: Stop | None = None,
        *,
        again: Mapping[str, int] | None = None,
        samples: Counter[str] | None = None,
        **options: Any,
    ) -> tuple[Forked, Tally]:
        """Start it (again): it ends where it is to end, or by itself; nothing is lost.

        Args:
            again: Prompt -> samples that `--retry` may ask for though they have a row.
            samples: What is selected of the dataset, when not all is.
        """
        before, derived = saved_rows(self.run), derived_files(self.run)
        number, self.starts = self.starts, self.starts + 1
        url = self.harness.server_url
        options = {"resume": True, "base_url": base_url(url, self.name, number)} | options
        ended = self.harness.run(self.folder, stop, **options)
        selected = self.samples if samples is None else samples
        tally = Tally(selected, before, saved_rows(self.run), counts(url, self.name, number))
        ends = {DONE} if stop is None else {DONE, STOPPED if stop.how == "cancel" else KILLED}
        assert ended.code in ends, (ended, (self.folder / "output.txt").read_text())
        assert ended.code != STOPPED or ended.error.startswith("CancelledError"), ended.error
        assert_derived_files_are_whole(self.run, derived)
        tally.assert_nothing_lost(0 if ended.code == DONE else IN_FLIGHT, again)
        return ended, tally

    def finish(self, **options: Any) -> Tally:
        """Start it for the last time: it runs to its end, asking for what is owed and for nothing else."""
        _, tally = self.start(**options)
        tally.assert_complete()
        return tally

    def merge(self, stop: Stop | None = None) -> Forked:
        """Run the verb `merge`, which changes no row."""
        before, derived = saved_rows(self.run), derived_files(self.run)
        ended = self.harness.merge(self.folder, stop)
        assert ended.code == DONE or (stop and ended.code == KILLED), ended
        assert saved_rows(self.run) == before
        assert_derived_files_are_whole(self.run, derived)
        return ended

    def has_retried(self, choice: str) -> bool:
        """Whether the last start that is known was a `--retry` of this choice, and has run all of it."""
        start = orjson.loads((self.run / "run.json").read_bytes())["starts"][-1]
        return bool(start["retry"] == choice and start["complete"])

    def rows_of(self, prompt: str) -> int:
        """How many rows of a prompt are on disk, of all attempts."""
        return sum(prompt_of(row) == prompt for row in saved_rows(self.run).all)
