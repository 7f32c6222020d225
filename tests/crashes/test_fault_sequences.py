"""Any sequence of edits, runs, kills, torn lines and lost files, and then one resume: what is there is what is owed.

The model knows of identities no more than this: a row that is done counts for any sample of its prompt, each row for
one sample, and of several attempts of one sample the latest. (No rows of these datasets name an image or a cwd.)
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crashes.cases import Case
from tests.crashes.conftest import SCALE
from tests.crashes.folders import DERIVED, FAILED, saved_rows
from tests.crashes.harness import DONE, Harness, Stop
from tests.crashes.scripts import TURNS, kind_of
from tests.rows import prompts_in

EXAMPLES = 25
MERGED = ("plain", "tools", "partial")
RETRIES = ("partial", "discarded", "filtered", "failed,partial", "none")
MOST_CALLS = 70
"""A number of a call beyond the last lets the run end by itself."""
Operation = tuple[Any, ...]

prompts = st.tuples(st.sampled_from(sorted(TURNS)), st.integers(0, 1)).map(lambda made: f"{made[0]} {made[1]}")
rows = st.builds(lambda prompt, note: {"prompt": prompt} | ({"note": note} if note else {}), prompts, st.integers(0, 2))
seeds = st.integers(0, 2**32)
stops = st.builds(
    Stop, st.integers(1, MOST_CALLS), st.sampled_from(("before", "after", "half", "unended", "power", "cancel"))
)
edits = st.one_of(
    st.tuples(st.just("reorder"), seeds),
    st.tuples(st.just("append"), st.lists(rows, min_size=1, max_size=3)),
    st.tuples(st.just("remove"), seeds),
    st.tuples(st.just("duplicate"), seeds),
    st.tuples(st.just("annotate"), seeds, st.integers(0, 2)),
    st.tuples(st.just("rewrite"), seeds, prompts),
)
runs = st.one_of(
    st.tuples(st.just("run")),
    st.tuples(st.just("stop"), stops),
    st.tuples(st.just("stop"), stops),
    st.tuples(st.just("retry"), st.sampled_from(RETRIES), st.none() | stops),
    st.tuples(st.just("first"), st.integers(1, 4)),
    st.tuples(st.just("merge")),
)
damages = st.one_of(
    st.tuples(st.just("lose"), st.sampled_from(DERIVED)),
    st.tuples(st.just("cut"), st.sampled_from(DERIVED), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("tear"), seeds, st.floats(0, 1, exclude_min=True)),
)
sequences = st.lists(st.one_of(runs, edits, damages), min_size=2, max_size=7)


class World:
    """A run folder and a dataset, to which things happen."""

    def __init__(self, harness: Harness, dataset: list[dict[str, Any]]) -> None:
        self.dataset = dataset
        self.case = Case(harness, Path(mkdtemp(prefix="pm-", dir="/tmp")), dataset)

    def do(self, operation: Operation) -> None:
        """Let one thing happen."""
        name, *arguments = operation
        getattr(self, name)(*arguments)

    # edits of the dataset

    def _edited(self) -> None:
        self.case.set_dataset(self.dataset)

    def reorder(self, seed: int) -> None:
        Random(seed).shuffle(self.dataset)
        self._edited()

    def append(self, new: list[dict[str, Any]]) -> None:
        self.dataset += new
        self._edited()

    def remove(self, seed: int) -> None:
        if len(self.dataset) > 1:
            del self.dataset[seed % len(self.dataset)]
            self._edited()

    def duplicate(self, seed: int) -> None:
        self.dataset.append(self.dataset[seed % len(self.dataset)])
        self._edited()

    def annotate(self, seed: int, note: int) -> None:
        """Change a further column."""
        self.dataset[seed % len(self.dataset)] = self.dataset[seed % len(self.dataset)] | {"note": note}
        self._edited()

    def rewrite(self, seed: int, prompt: str) -> None:
        """Change a prompt."""
        self.dataset[seed % len(self.dataset)] = self.dataset[seed % len(self.dataset)] | {"prompt": prompt}
        self._edited()

    # starts

    def run(self) -> None:
        self._start()

    def stop(self, stop: Stop) -> None:
        self._start(stop)

    def retry(self, choice: str, stop: Stop | None) -> None:
        again = {prompt: count for prompt, count in self.case.samples.items() if kind_of(prompt) in choice}
        self._start(stop, again=again, retry=choice)

    def first(self, count: int) -> None:
        """Run the first few samples only."""
        samples = Counter(str(row["prompt"]) for row in self.dataset[:count])
        self._start(samples=samples, max_samples=count)

    def _start(self, stop: Stop | None = None, **options: Any) -> None:
        free: dict[str, Any] = {"accept_changes": True, "max_samples": "all"}
        ended, tally = self.case.start(stop, **free | options)
        if ended.code == DONE and "retry" not in options:
            tally.assert_complete()
            self.assert_published(options.get("samples", self.case.samples))

    def merge(self) -> None:
        if any(saved_rows(self.case.run).by_file):
            self.case.merge()

    # damage

    def lose(self, name: str) -> None:
        (self.case.run / name).unlink(missing_ok=True)

    def cut(self, name: str, share: float) -> None:
        path = self.case.run / name
        if path.exists():
            content = path.read_bytes()
            path.write_bytes(content[: int(len(content) * share)])

    def tear(self, seed: int, share: float) -> None:
        """Cut some bytes, at least one, off the last line of a file of rows."""
        files = sorted(path for path in self.case.run.glob("*.jsonl") if path.name not in DERIVED)
        if files:
            path = files[seed % len(files)]
            content = path.read_bytes()
            last = len(content) - (content.rstrip(b"\n").rfind(b"\n") + 1)
            path.write_bytes(content[: len(content) - max(1, round(last * share))])

    # what must be so

    def assert_published(self, selected: Counter[str]) -> None:
        """What an uninterrupted run of the selected part of the dataset, as it is now, would have published."""
        run = self.case.run
        expected = Counter({prompt: count for prompt, count in selected.items() if kind_of(prompt) in MERGED})
        assert Counter(prompts_in(run / "trajectories.jsonl")) == expected
        kinds: Counter[str] = Counter()
        for prompt, count in selected.items():
            kinds[kind_of(prompt)] += count
        samples = orjson.loads((run / "statistics.json").read_bytes())["samples"]
        assert samples == {
            "dataset_rows": len(self.dataset),
            "completed": kinds["plain"] + kinds["tools"],
            "partial": kinds["partial"],
            "discarded_no_reasoning": kinds["discarded"],
            "filtered": kinds["filtered"],
            "failed": kinds["failed"],
            "pending": 0,
            "not_selected": len(self.dataset) - selected.total(),
            "invalid": 0,
        }
        assert sum(samples.values()) - samples["dataset_rows"] == len(self.dataset)
        done = [i for i, row in enumerate(self.dataset[: selected.total()]) if kind_of(row["prompt"]) != "failed"]
        assert orjson.loads((run / "checkpoint.json").read_bytes())["completed_prompts"] == done

    def assert_a_further_resume_asks_for_nothing_but_what_failed(self) -> None:
        before = {path: path.read_bytes() for path in self.case.run.glob("*.jsonl") if path.name != FAILED}
        _, tally = self.case.start(accept_changes=True, max_samples="all")
        assert {kind_of(prompt) for prompt in tally.requests} <= {"failed"}
        assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES * SCALE,
    derandomize=SCALE == 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(dataset=st.lists(rows, min_size=1, max_size=6), sequence=sequences)
def test_whatever_happens_a_resume_leaves_exactly_what_the_dataset_owes(
    harness: Harness, dataset: list[Mapping[str, Any]], sequence: list[Operation]
) -> None:
    world = World(harness, [dict(row) for row in dataset])
    try:
        for operation in sequence:
            world.do(operation)
        world.run()
        world.assert_a_further_resume_asks_for_nothing_but_what_failed()
    finally:
        shutil.rmtree(world.case.folder)
