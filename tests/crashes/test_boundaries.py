"""The runner is killed at every call that writes to its folder, and resumed.

Beside the kills: power cuts, that is kills after which only what was forced to disk is there. The final files are
those of an uninterrupted run, but for times, batch numbers and attempts; see `folders.published`. A prompt that fails
for good is asked for again at each start, and costs nothing in the statistics, since no reply to it was counted.
"""

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crashes.cases import PROMPTS, Case
from tests.crashes.conftest import SCALE
from tests.crashes.folders import Published, published
from tests.crashes.harness import KILLED, Forked, Harness, Stop
from tests.crashes.scripts import counts
from tests.test_command import processes_of, wait_for_end_of

AS_OFTEN_AS_IT_IS_CHEAP = {
    "fsync .", "create .checkpoint.json.new", "write .checkpoint.json.new", "fsync .checkpoint.json.new",
    "replace checkpoint.json",
}  # fmt: skip
"""The checkpoint is saved after a batch unless that costs too much, so a run may have fewer such calls than another."""
PARTS = 8
"""Over which the boundaries are spread, so that several processes may share them."""
DOUBLE_KILLS = 3
RETRY_KILLS = 2
"""Cases of each part."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="pm-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def finished(harness: Harness, folder: Path) -> Case:
    """An uninterrupted run."""
    case = Case(harness, folder / "finished")
    case.finish()
    return case


@pytest.fixture(scope="module")
def uninterrupted(finished: Case) -> Published:
    return published(finished.run)


@pytest.fixture(scope="module")
def boundaries(harness: Harness, folder: Path) -> list[Stop]:
    """Every way to be killed at every call of a run."""
    ended, _ = Case(harness, folder / "counted").start()
    return stops_of(ended)


def stops_of(ended: Forked) -> list[Stop]:
    """Every way to be killed at each call that a child has made."""
    seen: Counter[str] = Counter()
    stops: list[Stop] = []
    for call in ended.calls:
        seen[call] += 1
        stops += [Stop(seen[call], how, among=call) for how in ways(*call.split(maxsplit=1))]
    return stops


def ways(name: str, file: str) -> Sequence[str]:
    """How to be killed at a call.

    A kill after a call that forces to disk finds what the one before it finds. The end of a line is of interest only
    where lines are appended.
    """
    if name == "write":
        return (*(("before", "unended") if file.endswith(".jsonl") else ()), "half", "after", "power")
    return ("before", "power") if name in ("create", "replace", "unlink") else ("before",)


@pytest.mark.parametrize("part", range(PARTS))
async def test_a_run_that_is_killed_at_any_boundary_resumes_to_the_same_files(
    harness, folder, boundaries, uninterrupted, part
):
    for number, stop in enumerate(boundaries[part::PARTS] * SCALE):
        case = Case(harness, folder / f"boundary-{part}-{number}")
        ended, _ = case.start(stop)
        assert ended.code == KILLED or (stop.number > 1 and stop.among in AS_OFTEN_AS_IT_IS_CHEAP), stop
        case.finish()
        assert published(case.run) == uninterrupted, stop
        shutil.rmtree(case.folder)
    await no_process_is_left(harness)


async def no_process_is_left(harness: Harness) -> None:
    """Nothing that a killed child has started outlives it by more than a few seconds."""
    await wait_for_end_of(processes_of(harness.scratch).keys() - {harness.pid}, timeout_s=5)


@pytest.mark.parametrize("part", range(PARTS))
async def test_a_resume_that_is_killed_too_loses_nothing(harness, folder, boundaries, uninterrupted, part):
    rng = random.Random(f"double {part}")
    for number in range(DOUBLE_KILLS * SCALE):
        case = Case(harness, folder / f"double-{part}-{number}")
        for stop in rng.choices(boundaries, k=rng.choice((2, 2, 3))):
            case.start(stop)
            if case.run.exists() and any(case.run.glob("batch_*.jsonl")) and rng.random() < 0.5:
                case.merge()
        case.finish()
        assert published(case.run) == uninterrupted
        shutil.rmtree(case.folder)


def copy_of(finished: Case, folder: Path) -> Case:
    shutil.copytree(finished.folder, folder)
    return Case(finished.harness, folder)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("retry", ["", "partial"], ids=["then_resume", "then_retry"])
async def test_a_retry_that_is_killed_loses_nothing_and_pays_for_nothing_twice(
    harness, folder, finished, uninterrupted, retry, part
):
    rng = random.Random(f"retry {retry} {part}")
    (partial,) = (prompt for prompt in PROMPTS if prompt.startswith("partial"))
    counted = copy_of(finished, folder / f"retry-{retry}-{part}")
    stops = stops_of(counted.start(retry="partial", again={partial: 1})[0])
    for number, stop in enumerate(rng.sample(stops, min(len(stops), RETRY_KILLS * SCALE))):
        case = copy_of(finished, folder / f"retry-{retry}-{part}-{number}")
        case.start(stop, retry="partial", again={partial: 1})
        came_back, ran_through = case.rows_of(partial) == 2, case.has_retried("partial")
        if retry:
            _, tally = case.start(retry="partial", again={partial: 1})
            assert tally.requests[partial] == (ran_through or not came_back)
        case.finish()
        attempts = case.rows_of(partial)
        assert attempts == (3 if retry and ran_through else 2 if retry or came_back else 1)
        assert_same_but_for_more_attempts(published(case.run), uninterrupted, attempts - 1)
        shutil.rmtree(case.folder)


def assert_same_but_for_more_attempts(now: Published, uninterrupted: Published, attempts: int) -> None:
    """Each further attempt was one call, is kept in its shard, and counts for nothing but its cost."""
    statistics = dict(now.statistics)
    assert statistics["api_calls"] == uninterrupted.statistics["api_calls"] + attempts
    assert statistics["rows_left_behind"]["superseded"] == attempts
    for name in ("api_calls", "tokens", "cost", "rows_left_behind"):
        statistics[name] = uninterrupted.statistics[name]
    batches = now.batch_counts.copy()
    batches["processed"] -= attempts
    assert replace(now, statistics=statistics, batch_counts=batches) == uninterrupted


@pytest.mark.parametrize("published_before", [True, False])
async def test_a_merge_that_is_killed_at_any_boundary_can_be_made_again(
    harness, folder, finished, uninterrupted, published_before
):
    counted = copy_of(finished, folder / f"merge-{published_before}")
    for number, stop in enumerate(stops_of(counted.merge())):
        case = copy_of(finished, folder / f"merge-{published_before}-{number}")
        if not published_before:
            (case.run / "trajectories.jsonl").unlink()
            (case.run / "statistics.json").unlink()
        assert case.merge(stop).code == KILLED
        case.merge()
        assert published(case.run) == uninterrupted
        assert not counts(harness.server_url, case.name, 0)
        shutil.rmtree(case.folder)
