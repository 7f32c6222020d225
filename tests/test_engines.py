"""What every engine promises, and what the process engine promises when processes die."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pytest

from promptmill.config import WorkerSettings, build_config
from promptmill.engines import ENGINES, engine_class
from promptmill.errors import ConfigError, EndpointError
from promptmill.records import Batch, Sample, SampleResult, TurnEvent
from tests.fakes.model_server import Answer, RecordedRequest, ScriptedServer, call, fail, one_turn, say
from tests.processes import wait_until
from tests.rows import hash_of, options
from tests.test_command import (
    as_flags,
    processes_of,
    run_options,
    scratch,
    started,
    wait_for_end_of,
)

__all__ = ["scratch"]  # a fixture

every_engine = pytest.mark.parametrize("name", ENGINES)

KILL_THE_WORKER = "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
"""In the local sandbox, whose supervisor is a child of the process that holds the conversation."""


class Recorder:
    """Takes what an engine hands on."""

    def __init__(self) -> None:
        self.results: list[SampleResult] = []
        self.finished_batches: list[int] = []
        self.turns: list[TurnEvent] = []
        self.limits: list[tuple[int, int]] = []
        self.notes: list[str] = []

    def may_start(self, batch_number: int) -> bool:
        del batch_number
        return True

    async def sample_finished(self, result: SampleResult) -> bool:
        self.results.append(result)
        return result.has_next

    def note(self, line: str) -> None:
        self.notes.append(line)

    async def batch_finished(self, number: int) -> None:
        self.finished_batches.append(number)

    def turn(self, event: TurnEvent) -> None:
        self.turns.append(event)

    def limit_changed(self, limit: int, refusals: int, said: str) -> None:
        self.limits.append((limit, refusals))

    @property
    def prompts(self) -> list[str]:
        return [result.summary.prompt for result in self.results]

    def prompts_of(self, number: int) -> list[str]:
        """A batch's prompts, in the order in which they ended."""
        return [result.summary.prompt for result in self.results if result.batch_number == number]

    @property
    def outcome_of(self) -> dict[str, tuple[str, str]]:
        """Prompt -> (outcome, stop reason)."""
        return {r.summary.prompt: (str(r.summary.outcome), r.summary.stop_reason) for r in self.results}


class Batches:
    """An iterator of batches that knows how many were taken."""

    def __init__(self, *batches: Sequence[str]) -> None:
        self.taken = 0
        self._batches = self._make(batches)

    def _make(self, batches: Sequence[Sequence[str]]) -> Iterator[Batch]:
        index = 0
        for number, prompts in enumerate(batches):
            samples = [Sample(index + n, prompt, hash_of(prompt)) for n, prompt in enumerate(prompts)]
            index += len(samples)
            self.taken += 1
            yield Batch(number, tuple(samples))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


async def run_engine(name: str, server: ScriptedServer, batches: Batches, recorder: Recorder, **given: object) -> None:
    """Run batches on an engine, their tools in the local sandbox."""
    given = {"num_workers": 2, "base_url": server.base_url, "model": "test/model"} | given
    config = build_config(options(**given), {})
    settings = WorkerSettings(config, "local", ("terminal", "file"), conversations=config.num_workers)
    async with asyncio.timeout(60):
        await engine_class(name)(settings).run(batches, recorder)


# ── every engine ──────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown engine 'ray'; known: processes, inline"):
        engine_class("ray")


@every_engine
async def test_every_sample_ends_once_and_a_batchs_samples_end_in_order(name, server):
    recorder = Recorder()
    await run_engine(name, server, Batches("abc", "def", "g"), recorder)
    assert [recorder.prompts_of(number) for number in range(3)] == [list("abc"), list("def"), list("g")]
    assert sorted(recorder.finished_batches) == [0, 1, 2]
    assert sorted(server.prompts) == list("abcdefg")
    for result in recorder.results:
        row = orjson.loads(result.row)
        assert (row["prompt_index"], row["metadata"]["batch_num"]) == (result.index, result.batch_number)
        assert "abcdefg"[result.index] == result.summary.prompt


@every_engine
async def test_no_batch_at_all_is_a_run_that_ends_at_once(name, server):
    recorder = Recorder()
    await run_engine(name, server, Batches(), recorder)
    assert (recorder.results, server.count) == ([], 0)


@every_engine
async def test_num_workers_batches_are_in_flight_no_more_and_none_is_taken_before_its_time(name, server):
    batches = Batches(*(f"{letter}" for letter in "abcdefgh"))
    taken_by_finished: list[tuple[int, int]] = []
    full = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if server.in_flight == 3:
            full.set()
        await full.wait()
        return one_turn(request)

    class Watching(Recorder):
        async def sample_finished(self, result: SampleResult) -> bool:
            go_on = await super().sample_finished(result)
            taken_by_finished.append((batches.taken, len(self.results)))
            return go_on

    server.script = script
    recorder = Watching()
    await run_engine(name, server, batches, recorder, num_workers=3)
    assert server.max_in_flight == 3
    assert sorted(recorder.prompts) == list("abcdefgh")
    assert all(taken <= finished + 3 for taken, finished in taken_by_finished)


@every_engine
async def test_a_sample_that_fails_does_not_stop_its_neighbours(name, server):
    server.script = lambda request: fail(400, "no") if request.prompt in "be" else one_turn(request)
    recorder = Recorder()
    await run_engine(name, server, Batches("abc", "def"), recorder)
    assert [recorder.prompts_of(number) for number in range(2)] == [list("abc"), list("def")]
    failed, completed = ("failed_permanent", "rejected_request"), ("completed", "answer")
    assert recorder.outcome_of == {p: failed if p in "be" else completed for p in "abcdef"}


@every_engine
async def test_a_refused_key_stops_everything_and_leaves_the_rest_pending(name, server):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "d":
            held.set()
            await asyncio.Event().wait()
        if request.prompt == "b":
            await held.wait()
            return fail(401, "bad key")
        return one_turn(request)

    server.script = script
    recorder = Recorder()
    batches = Batches("abc", "def", "ghi")
    with pytest.raises(EndpointError, match="answered 401: bad key"):
        await run_engine(name, server, batches, recorder)
    assert (recorder.prompts, recorder.finished_batches, batches.taken) == (["a"], [], 2)
    assert sorted(server.prompts) == ["a", "b", "d"]
    assert multiprocessing.active_children() == []


@every_engine
async def test_turns_are_told_when_the_run_is_verbose_and_only_then(name, server):
    loud, quiet = Recorder(), Recorder()
    await run_engine(name, server, Batches("a"), loud, verbose=True)
    await run_engine(name, server, Batches("a"), quiet)
    assert [(event.index, event.text) for event in loud.turns] == [
        (0, "asks    a"),
        (0, "thinks  No tool is needed."),
        (0, "says    answer to a"),
        (0, "ends    answer"),
    ]
    assert quiet.turns == []


@every_engine
async def test_a_fault_of_the_events_ends_the_run(name, server):
    class Full(Recorder):
        async def sample_finished(self, result: SampleResult) -> bool:
            raise EndpointError("disk full, say")

    with pytest.raises(EndpointError, match="disk full"):
        await run_engine(name, server, Batches("abc", "def"), Full())
    assert server.count <= 4
    assert multiprocessing.active_children() == []


@every_engine
async def test_nothing_runs_on_after_a_cancellation(name, server):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "b":
            held.set()
            await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    recorder = Recorder()
    running = asyncio.create_task(run_engine(name, server, Batches("abc", "def"), recorder, num_workers=1))
    await held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (recorder.prompts, server.prompts) == (["a"], ["a", "b"])
    assert multiprocessing.active_children() == []


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────


def killing(prompt: str, times: int) -> "KillingScript":
    return KillingScript(prompt, times)


class KillingScript:
    """Has a prompt's first attempts kill the worker they run in; every other prompt is answered."""

    def __init__(self, prompt: str, times: int) -> None:
        self.prompt = prompt
        self.left = times

    def __call__(self, request: RecordedRequest) -> Answer:
        if request.prompt == self.prompt and self.left:
            self.left -= 1
            return call("terminal", {"command": KILL_THE_WORKER}, reasoning="r")
        return one_turn(request)


async def test_a_worker_that_is_killed_is_replaced_and_its_sample_run_again(server):
    server.script = killing("b", times=1)
    recorder = Recorder()
    await run_engine("processes", server, Batches("abc", "def"), recorder)
    assert [recorder.prompts_of(number) for number in range(2)] == [list("abc"), list("def")]
    assert set(recorder.outcome_of.values()) == {("completed", "answer")}
    assert sorted(recorder.finished_batches) == [0, 1]
    assert sorted(server.prompts) == list("abbcdef")
    assert multiprocessing.active_children() == []


async def test_a_sample_whose_worker_dies_twice_is_failed_and_its_neighbours_are_not(server):
    server.script = killing("b", times=9)
    recorder = Recorder()
    await run_engine("processes", server, Batches("abc", "def"), recorder)
    assert [recorder.prompts_of(number) for number in range(2)] == [list("abc"), list("def")]
    completed = ("completed", "answer")
    assert recorder.outcome_of == dict.fromkeys("acdef", completed) | {"b": ("failed_transient", "worker_died")}
    (failed,) = (orjson.loads(result.row) for result in recorder.results if result.summary.prompt == "b")
    assert failed["error"] == "2 worker processes died while this prompt ran"
    assert sorted(recorder.finished_batches) == [0, 1]
    assert server.prompts.count("b") == 2
    assert multiprocessing.active_children() == []


async def test_a_sample_that_shares_a_worker_with_a_killer_is_run_to_its_end(server):
    slow_is_there, killed_twice = asyncio.Event(), asyncio.Event()
    kills = killing("killer", times=9)

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "killer":
            await slow_is_there.wait()
            if kills.left == 8:
                killed_twice.set()
            return kills(request)
        if request.prompt != "slow" or request.turn:
            return one_turn(request)
        if not slow_is_there.is_set():
            slow_is_there.set()
            await asyncio.Event().wait()
        await killed_twice.wait()
        return call("terminal", {"command": "sleep 1"}, reasoning="r")  # beside the killer it would not live as long

    server.script = script
    recorder = Recorder()
    # Eight workers on four processes: the first and the fifth batch share one.
    batches = Batches(["killer"], ["a"], ["b"], ["c"], ["slow"])
    await run_engine("processes", server, batches, recorder, num_workers=8)
    assert recorder.outcome_of == {
        **dict.fromkeys(["a", "b", "c", "slow"], ("completed", "answer")),
        "killer": ("failed_transient", "worker_died"),
    }


async def test_few_batches_are_spread_over_the_processes(server):
    where = {"command": "awk '/^PPid/ {print $2}' /proc/$PPID/status"}
    server.script = lambda r: say("x", reasoning="r") if r.turn else call("terminal", where, reasoning="r")
    recorder = Recorder()
    await run_engine("processes", server, Batches("a", "b", "c", "d"), recorder, num_workers=16)
    pids = {orjson.loads(request.tool_outputs[0])["output"] for request in server.requests if request.turn}
    assert len(pids) == 4
    assert str(os.getpid()) not in pids


async def test_no_process_is_left_after_a_run(server, scratch):
    options = run_options(server.base_url, ["a", "b"], batch_size=1)
    async with started(*as_flags(options), TMPDIR=str(scratch)) as running:
        assert (await running.ended()).code == 0
    await wait_for_end_of(processes_of(scratch))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("sandbox", ["auto", "local"])
async def test_no_process_is_left_after_the_runner_was_killed(server, scratch, sandbox):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.turn == 0:
            lasting = {"command": f"exec -a {scratch} sleep 600", "background": True}
            return call("terminal", lasting, reasoning="r")
        held.set()
        await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    options = run_options(server.base_url, ["a"], sandbox=sandbox)
    async with started(*as_flags(options), TMPDIR=str(scratch)) as running:
        await running.until(held)
        await wait_until(lambda: f"{scratch} 600" in str(processes_of(scratch)))
        family = processes_of(scratch)
        running.send(signal.SIGKILL)
        await wait_for_end_of(family)
    assert processes_of(scratch) == {}
    assert [path for path in scratch.iterdir() if path.name.startswith("promptmill-")] == []


async def test_a_scratch_folder_with_a_long_path_is_no_hindrance(server, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    async with started(*as_flags(run_options(server.base_url, ["a"])), TMPDIR=str(deep)) as running:
        ended = await running.ended()
    assert ended.code == 0, ended.stderr
    assert Path("data/run/trajectories.jsonl").read_bytes()
