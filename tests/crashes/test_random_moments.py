"""Real commands with worker processes, killed by SIGKILL at random moments, and resumed.

Killed is the runner alone, one worker alone, or everything in the runner's process group. What is in flight at the kill
of a runner is at most one prompt a worker, at the kill of a worker its own. The tools leave a process running in their
sandbox: neither it nor anything else outlives a killed runner by more than a few seconds. Kills of one worker that are
aimed, not random, are in `test_engines` and `test_nothing_lost`.
"""

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.crashes.conftest import SCALE
from tests.crashes.folders import Published, assert_derived_files_are_whole, published, saved_rows
from tests.crashes.harness import OPTIONS
from tests.crashes.scripts import TURNS, base_url, counts, kind_of
from tests.crashes.tallies import Tally
from tests.fakes.model_server import REPOSITORY, ServerProcess
from tests.processes import LOOK_S, child_pids
from tests.rows import write_dataset
from tests.test_command import as_flags, processes_of, scratch, wait_for_end_of

__all__ = ["scratch"]  # a fixture

CASES = 12
WORKERS = 4
STARTING_S = 1.5
"""How long a command may take until it asks for something."""
TURN_S = 0.2
OUTLIVING_S = 8.0
"""A worker whose event loop does not end is ended 5 s after its runner."""
VICTIMS = ("runner", "runner", "worker", "group")
PROMPTS = [f"{kind} {n}" for n in range(4) for kind in ("plain", "tools", "plain")] + [
    "discarded 0", "partial 0", "failed 0", "filtered 0",
]  # fmt: skip
REQUESTS = sum(TURNS[kind_of(prompt)] for prompt in PROMPTS)
INCOMPLETE = 1
"""The exit code, since one prompt fails."""


@pytest.fixture(scope="module")
def slow_server() -> Iterator[ServerProcess]:
    """Answers after 50 to 200 ms."""
    with ServerProcess("tests.crashes.scripts:slow_script", max_recorded=1) as server:
        yield server


class Run:
    """A run of the command in the current folder."""

    def __init__(self, server: ServerProcess, name: str, scratch: Path) -> None:
        self.server = server
        self.name = name
        self.scratch = scratch
        self.path = Path("data/run")
        self.starts = 0
        self.samples = Counter(PROMPTS)
        write_dataset(Path.cwd(), PROMPTS)

    async def start(self, moment: float | None = None, victim: str = "") -> Tally:
        """Start it (again), and kill something at a moment; see what was asked for and what is there.

        Args:
            moment: From 0 to 1: until a quarter while it starts, then by how much it has asked for.
        """
        before = saved_rows(self.path)
        number, self.starts = self.starts, self.starts + 1
        killed = Counter[str]()
        async with self._command(base_url(self.server.proxy_url, self.name, number)) as process:
            if moment is not None:
                await self._wait_for(process, number, moment)
                killed = await self._kill(process, victim)
            _, told = await process.communicate()
            assert process.returncode in (INCOMPLETE, -signal.SIGKILL), told.decode()
        tally = Tally(self.samples, before, saved_rows(self.path), self._counts(number))
        assert_derived_files_are_whole(self.path)
        tally.assert_nothing_lost(WORKERS * killed["runner"], dead_workers_prompts=killed["worker"])
        return tally

    def _counts(self, number: int) -> Counter[str]:
        return counts(self.server.proxy_url, self.name, number)

    async def _wait_for(self, process: asyncio.subprocess.Process, number: int, moment: float) -> None:
        asked = REQUESTS * (moment - 0.25) / 0.75
        while asked > 0 and process.returncode is None and self._counts(number).total() < asked:
            await asyncio.sleep(LOOK_S)
        left_s = STARTING_S * 4 * moment if asked <= 0 else TURN_S * (asked % 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await process.wait()

    @asynccontextmanager
    async def _command(self, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
        flags = as_flags(OPTIONS | {"num_workers": WORKERS, "batch_size": 2, "resume": True, "base_url": url})
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", str(REPOSITORY / "batch_runner.py"), *flags,
            stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.scratch)},
        )  # fmt: skip
        try:
            async with asyncio.timeout(90):
                yield process
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()

    async def _kill(self, process: asyncio.subprocess.Process, victim: str) -> Counter[str]:
        """Kill, if it still runs; returns what was killed."""
        if process.returncode is not None:
            return Counter()
        if victim == "worker":
            workers = workers_of(process.pid)
            for worker in workers[:1]:
                os.kill(worker, signal.SIGKILL)
            return Counter(worker=len(workers[:1]))
        family = processes_of(self.scratch)
        if victim == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        await wait_for_end_of(family, OUTLIVING_S)
        assert processes_of(self.scratch) == {}, f"outlives the kill of the {victim}"
        return Counter(runner=1)


def workers_of(runner: int) -> list[int]:
    """The worker processes of a runner: those that its fork server has started."""
    return [worker for server in child_pids(runner, "forkserver") for worker in child_pids(server, "forkserver")]


@pytest.fixture(scope="module")
def uninterrupted(slow_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("uninterrupted")
    before = Path.cwd()
    os.chdir(folder)
    try:
        run = Run(slow_server, "uninterrupted", folder)
        asyncio.run(run.start()).assert_complete()
        return published(run.path.absolute())
    finally:
        os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CASES * SCALE))
async def test_a_command_that_is_killed_at_any_moment_resumes_to_the_same_files(
    slow_server, scratch, uninterrupted, number
):
    rng = random.Random(f"moments {number}")
    run = Run(slow_server, f"moments-{number}", scratch)
    for _ in range(rng.choice((1, 2, 3))):
        await run.start(rng.random(), rng.choice(VICTIMS))
    (await run.start()).assert_complete()
    assert published(run.path) == uninterrupted
    await wait_for_end_of(processes_of(scratch))
    assert [path for path in scratch.iterdir() if path.name.startswith("promptmill-")] == []
