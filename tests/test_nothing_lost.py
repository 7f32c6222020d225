"""Stops, stalls and deaths: what is paid for is kept, nothing hangs, nothing is left running."""

import asyncio
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from promptmill.config import WorkerSettings, build_config
from promptmill.engines import ENGINES
from promptmill.engines.frames import FrameChannel, RowSaved
from promptmill.engines.processes import ProcessEngine
from promptmill.errors import THEN_AGAIN, ConfigError, EndpointError, StorageError
from promptmill.event_loop import to_its_end
from promptmill.records import SampleResult
from promptmill.run_folder import RunFolder
from promptmill.runner import BatchRunner
from tests.fakes.model_server import (
    REPOSITORY,
    Answer,
    RecordedRequest,
    ScriptedServer,
    call,
    fail,
    in_order,
    one_turn,
    say,
)
from tests.processes import wait_until
from tests.rows import options, write_dataset
from tests.test_command import (
    RunFiles,
    as_flags,
    command,
    processes_of,
    run_inline,
    run_options,
    scratch,
    started,
    wait_for_end_of,
)
from tests.test_engines import Batches, KillingScript, Recorder, run_engine

__all__ = ["scratch"]  # a fixture

every_engine = pytest.mark.parametrize("name", ENGINES)

STOP_THE_WORKER = "kill -STOP $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"
"""In the local sandbox, whose supervisor is a child of the process that holds the conversation."""


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


def worker_settings(server: ScriptedServer, **given: object) -> WorkerSettings:
    config = build_config(options(base_url=server.base_url, model="test/model", **given), {})
    return WorkerSettings(config, "local", ("terminal", "file"), conversations=config.num_workers)


def run_folder() -> RunFiles:
    return RunFiles(Path("data/run"))


# ── a row is acknowledged ─────────────────────────────────────────────────────────────────────────────────


@every_engine
async def test_a_batch_waits_for_its_row_to_be_saved_while_others_go_on(name, server):
    others_are_done = asyncio.Event()
    asked_meanwhile: list[str] = []

    class SlowForA(Recorder):
        async def sample_finished(self, result: SampleResult) -> bool:
            if result.summary.prompt == "a":
                await others_are_done.wait()
                asked_meanwhile.extend(server.prompts)
            if result.summary.prompt == "h":
                others_are_done.set()
            return await super().sample_finished(result)

    recorder = SlowForA()
    await run_engine(name, server, Batches("abc", "defgh"), recorder)
    assert sorted(asked_meanwhile) == list("adefgh")
    assert sorted(recorder.prompts) == list("abcdefgh")


@every_engine
async def test_rows_of_one_worker_are_saved_together(name, server):
    all_there = asyncio.Event()

    class Together(Recorder):
        async def sample_finished(self, result: SampleResult) -> bool:
            go_on = await super().sample_finished(result)
            if len(self.results) == 8:
                all_there.set()
            await all_there.wait()
            return go_on

    recorder = Together()
    await run_engine(name, server, Batches(*"abcdefgh"), recorder, num_workers=8)  # on four processes
    assert sorted(recorder.finished_batches) == list(range(8))


@every_engine
async def test_what_may_not_start_is_not_started_and_ends_the_run_in_order(name, server):
    class UpToTwo(Recorder):
        def may_start(self, batch_number: int) -> bool:
            return len(self.results) < 2

        async def sample_finished(self, result: SampleResult) -> bool:
            return await super().sample_finished(result) and self.may_start(result.batch_number)

    recorder = UpToTwo()
    await run_engine(name, server, Batches("abc", "def"), recorder, num_workers=1)
    assert (recorder.prompts, server.prompts, recorder.finished_batches) == (["a", "b"], ["a", "b"], [0])


async def test_a_row_that_is_being_saved_when_its_worker_dies_counts_and_the_next_sample_is_not_blamed(server):
    class KilledWhileSaving(Recorder):
        async def sample_finished(self, result: SampleResult) -> bool:
            if result.summary.prompt == "a":
                (worker,) = multiprocessing.active_children()
                worker.kill()
                await wait_until(lambda: engine._lanes[0].channel is None)
            return await super().sample_finished(result)

    server.script = KillingScript("b", times=1)  # one that was blamed before would now be failed
    recorder = KilledWhileSaving()
    engine = ProcessEngine(worker_settings(server, num_workers=1))
    await engine.run(Batches("abc"), recorder)
    assert recorder.prompts == list("abc")
    assert set(recorder.outcome_of.values()) == {("completed", "answer")}
    assert server.prompts == list("abbc")


async def test_a_stopped_and_killed_runner_has_lost_no_more_rows_than_it_had_batches_in_flight(server):
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if server.count == 4:
            reached.set()
        if server.count >= 3:
            await go_on.wait()
        return one_turn(request)

    server.script = script
    prompts = [f"prompt {n}" for n in range(20)]
    flags = as_flags(run_options(server.base_url, prompts, num_workers=2))
    async with started(*flags) as running:
        await running.until(reached)
        running.send(signal.SIGSTOP)
        go_on.set()
        await wait_until(lambda: server.in_flight == 0)
        running.send(signal.SIGKILL)
        await running.ended()
    kept = sum(map(len, run_folder().shards.values()))
    assert server.count == 4
    assert server.count - kept <= 2


async def test_a_message_is_whole_though_the_wait_for_it_was_cancelled_in_its_middle():
    ours, theirs = socket.socketpair()
    channel, other = await FrameChannel.open(ours), await FrameChannel.open(theirs)
    other.post(RowSaved(7, go_on=True))
    theirs_again = socket.socket(fileno=os.dup(other._writer.get_extra_info("socket").fileno()))
    assert await channel.receive() == RowSaved(7, go_on=True)
    receiving = asyncio.create_task(channel.receive())
    theirs_again.setblocking(True)
    theirs_again.sendall((1000).to_bytes(8, "big") + bytes(500))
    await wait_until(lambda: channel._length == 1000)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert channel._length == 1000
    theirs_again.close()
    await other.close()
    assert await channel.receive() is None
    await channel.close()


async def test_what_had_arrived_when_the_connection_broke_is_still_received():
    ours, theirs = socket.socketpair()
    channel = await FrameChannel.open(ours)
    channel.post(RowSaved(1, go_on=True))  # never read: the other end's end is then a broken connection
    rows = [RowSaved(number, go_on=False) for number in (7, 8)]
    for payload in map(pickle.dumps, rows):
        theirs.sendall(len(payload).to_bytes(8, "big") + payload)
    theirs.close()
    await wait_until(lambda: channel._reader._eof)
    assert [await channel.receive() for _ in range(3)] == [*rows, None]
    await channel.close()


# ── a signal lets finish what is in flight ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("engine", "number", "code"),
    [("processes", signal.SIGINT, 130), ("inline", signal.SIGTERM, 143), ("processes", signal.SIGHUP, 129)],
)
async def test_a_signal_starts_nothing_more_and_ends_when_what_is_in_flight_has_finished(server, engine, number, code):
    both_held, release = asyncio.Event(), asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if server.in_flight == 2:
            both_held.set()
        await release.wait()
        return one_turn(request)

    server.script = script
    given = {"engine": engine, "batch_size": 3, "num_workers": 2, "grace_s": 600}
    async with started(*as_flags(run_options(server.base_url, list("abcdefghi"), **given))) as running:
        await running.until(both_held)
        running.send(number)
        told = await running.stderr_until("--resume goes on")
        release.set()
        ended = await running.ended()
    assert "Stopping: 2 prompts in flight get 600 s to finish; again: leave at once. What is finished is kept" in told
    assert (ended.code, "Traceback" in ended.stderr) == (code, False)
    assert sorted(server.prompts) == ["a", "d"]
    run = run_folder()
    assert run.shards == {"batch_0.jsonl": ["a"], "batch_1.jsonl": ["d"]}
    assert (run.samples["completed"], run.samples["pending"]) == (2, 7)
    ended = await command("--run_name=run", "--resume")
    assert (ended.code, sorted(run.prompts)) == (0, list("abcdefghi"))


async def test_a_signal_while_the_run_merges_lets_it_write_everything(server):
    fifo = Path("data/run/discarded.jsonl")

    def script(request: RecordedRequest) -> Answer:
        os.mkfifo(fifo)  # the merge reads this file
        return one_turn(request)

    server.script = script
    async with started(*as_flags(run_options(server.base_url, ["a"], grace_s=600))) as running:
        await wait_until(fifo.exists)
        writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
        running.send(signal.SIGTERM)
        await running.stderr_until("Stopping: what is finished is kept, --resume goes on. Again: leave at once.")
        os.close(writer)
        await feed_nothing(fifo, until=lambda: running.process.returncode is not None)
        ended = await running.ended()
    assert ended.code == 143
    assert (run_folder().prompts, run_folder().samples["completed"]) == (["a"], 1)
    assert [line["event"] for line in run_folder().lines("run.log")] == ["start", "end"]


async def feed_nothing(fifo: Path, until: Callable[[], bool]) -> None:
    """Let everybody who reads a fifo come to its end at once."""
    while not until():
        with suppress(OSError):  # nobody reads it now
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        await asyncio.sleep(0.02)  # a file gives no event


@every_engine
async def test_stop_starting_ends_a_run_without_an_error(name, server):
    runner = BatchRunner(**run_options(server.base_url, list("abcdef"), batch_size=3, num_workers=2, engine=name))
    counted: list[int] = []

    def script(request: RecordedRequest) -> Answer:
        counted.append(runner.stop_starting())
        return one_turn(request)

    server.script = script
    await runner.run()
    assert 1 <= server.count <= 2
    assert counted[0] in (1, 2)
    samples = runner.statistics["samples"]
    assert (samples["completed"], samples["pending"]) == (server.count, 6 - server.count)


# ── a worker that stops answering ─────────────────────────────────────────────────────────────────────────


class ImpatientEngine(ProcessEngine):
    """Waits for no busy machine."""

    answer_margin_s = 4.0


async def run_impatiently(server: ScriptedServer, batches: Batches, recorder: Recorder, **given: object) -> None:
    async with asyncio.timeout(60):
        await ImpatientEngine(worker_settings(server, **given)).run(batches, recorder)


async def test_a_worker_that_is_stopped_is_killed_and_its_prompts_are_run_again(server):
    stops = iter([call("terminal", {"command": STOP_THE_WORKER}, reasoning="r")])
    server.script = lambda r: next(stops, None) or one_turn(r) if r.prompt == "b" else one_turn(r)
    recorder = Recorder()
    await run_impatiently(server, Batches("abc", "d"), recorder, num_workers=2, prompt_timeout_s=1)
    assert recorder.prompts_of(0) == list("abc")
    assert set(recorder.outcome_of.values()) == {("completed", "answer")}
    (note,) = recorder.notes
    assert note.startswith("worker process ")
    assert note.endswith(" s: killed, its prompts are run again")
    assert multiprocessing.active_children() == []


async def test_a_prompt_that_stops_its_worker_twice_is_failed(server):
    stop = call("terminal", {"command": STOP_THE_WORKER}, reasoning="r")
    server.script = lambda request: stop if request.prompt == "b" else one_turn(request)
    recorder = Recorder()
    await run_impatiently(server, Batches("abc"), recorder, num_workers=1, prompt_timeout_s=1)
    assert recorder.outcome_of["b"] == ("failed_transient", "worker_died")
    assert recorder.prompts == list("abc")


async def test_a_worker_whose_prompt_waits_for_the_endpoint_s_room_is_left_alone(server):
    server.script = in_order(fail(429, "busy", headers={"retry-after": "7"}), say("at last", reasoning="r"))
    recorder = Recorder()
    await run_impatiently(server, Batches("a"), recorder, num_workers=1, prompt_timeout_s=1)
    assert (recorder.outcome_of["a"], recorder.notes) == (("completed", "answer"), [])


# ── nothing outlives a runner that is killed ──────────────────────────────────────────────────────────────

BLOCKING_PRICES = """
import pathlib
class Usage:
    def __init__(self, **tokens):
        pass
def calc_price(usage, model, provider_api_url):
    pathlib.Path(MARK).touch()
    while True:
        pass
"""
"""In place of the package: an endless loop in the event loop, at the first reply whose cost is looked up."""


async def test_a_worker_whose_event_loop_is_blocked_does_not_outlive_the_runner(server, scratch, tmp_path):
    mark = tmp_path / "blocked"
    (tmp_path / "blocking").mkdir()
    (tmp_path / "blocking" / "genai_prices.py").write_text(f"MARK = {str(mark)!r}\n{BLOCKING_PRICES}")
    environ = {"HTTP_PROXY": server.proxy_url, "PYTHONPATH": str(tmp_path / "blocking"), "TMPDIR": str(scratch)}
    flags = as_flags(run_options("http://openrouter.ai/api/v1", ["a"], api_key="k", sandbox="local"))
    async with started(*flags, **environ) as running:
        await wait_until(mark.exists)
        family = processes_of(scratch)
        running.send(signal.SIGKILL)
        await wait_for_end_of(family)
    assert processes_of(scratch) == {}


async def test_a_worker_that_is_stopped_does_not_outlive_the_runner(server, scratch):
    stopped = asyncio.Event()

    def script(request: RecordedRequest) -> Answer:
        stopped.set()
        return call("terminal", {"command": STOP_THE_WORKER}, reasoning="r")

    server.script = script
    flags = as_flags(run_options(server.base_url, ["a"], sandbox="local", distribution="terminal_only"))
    async with started(*flags, TMPDIR=str(scratch)) as running:
        await running.until(stopped)
        await wait_until(lambda: any(map(is_stopped, processes_of(scratch))))
        family = processes_of(scratch)
        running.send(signal.SIGKILL)
        await wait_for_end_of(family)
    assert processes_of(scratch) == {}


def is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


BLOCKED = """
import socket, sys
from promptmill.engines.process_worker import end_with_runner
end = socket.socket(fileno=int(sys.argv[1]))
end_with_runner(end, 0.2)
print("there", flush=True)
while True:
    pass
"""


async def test_that_the_runner_has_only_ended_its_sending_ends_no_process():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", BLOCKED, str(theirs.fileno())]
        process = subprocess.Popen(argv, cwd=REPOSITORY, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
        try:
            assert process.stdout
            assert await asyncio.to_thread(process.stdout.readline) == b"there\n"
            theirs.close()
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 1)
            ours.close()
            assert await asyncio.to_thread(process.wait, 20) == 1
        finally:
            process.kill()
            process.communicate()


# ── the end of a run ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_that_is_cancelled_while_it_merges_is_locked_until_the_merge_is_whole(server):
    fifo = Path("data/run/discarded.jsonl")

    def script(request: RecordedRequest) -> Answer:
        os.mkfifo(fifo)  # the merge reads this file
        return one_turn(request)

    server.script = script
    running = asyncio.create_task(run_inline(server.base_url, ["a"]))
    await wait_until(fifo.exists)
    writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=0.5)
    assert not done
    with pytest.raises(ConfigError, match="is in use"):
        RunFolder(fifo.parent).open()
    os.close(writer)
    await feed_nothing(fifo, until=running.done)
    with pytest.raises(asyncio.CancelledError):
        await running
    run = run_folder()
    assert (run.prompts, run.samples["completed"]) == (["a"], 1)
    assert [line["event"] for line in run.lines("run.log")] == ["start", "end"]


async def test_close_waits_for_what_the_writer_does_though_its_caller_has_left(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writing = asyncio.create_task(folder.on_writer(fifo.read_bytes))
    writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    closing = asyncio.create_task(asyncio.to_thread(folder.close))
    done, _ = await asyncio.wait([closing], timeout=0.2)
    assert not done
    os.close(writer)
    await closing
    with pytest.raises(StorageError, match="not open for writing"):
        await folder.on_writer(fifo.read_bytes)


async def test_no_number_of_cancellations_breaks_off_what_is_to_come_to_its_end():
    release = asyncio.Event()

    async def work() -> int:
        await release.wait()
        return 7

    waiting = asyncio.create_task(to_its_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await to_its_end(work()) == 7


@every_engine
async def test_of_several_files_that_the_disk_refuses_the_first_is_told(name, server):
    both_held, full = asyncio.Event(), asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if server.in_flight == 2:
            both_held.set()
        await full.wait()
        return one_turn(request)

    server.script = script
    flags = as_flags(run_options(server.base_url, list("abcd"), engine=name, num_workers=2, batch_size=2))
    async with started(*flags) as running:
        await running.until(both_held)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        full.set()
        ended = await running.ended()
    assert (ended.code, server.count) == (1, 2)
    said = r"error: data/run/batch_[01]\.jsonl: cannot write \(File too large\); make room or access, "
    assert re.fullmatch(said + re.escape(THEN_AGAIN), ended.stderr.splitlines()[-1])
    assert (await command("--run_name=run", "--resume")).code == 0
    assert sorted(run_folder().prompts) == list("abcd")


async def test_a_failing_end_does_not_hide_what_ended_the_run(server):
    def script(request: RecordedRequest) -> Answer:
        Path("data/run/.checkpoint.json.new").symlink_to("/dev/full")
        return fail(401, "bad key")

    server.script = script
    with pytest.raises(EndpointError, match="bad key"):
        await run_inline(server.base_url, ["a"])


async def test_workers_run_the_code_of_the_command_that_started_them(server, tmp_path):
    """Not that of an installed package of our name, nor what lies in the folder where the command is typed."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("promptmill", "toolsets"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "batch_runner.py", copy)
    finished = copy / "promptmill/finished.py"
    finished.write_text(finished.read_text().replace('"distribution", "max_turns"', '"max_turns"'))
    (elsewhere / "random.py").write_text("raise SystemExit('the wrong module')")
    write_dataset(elsewhere, ["a"])
    typed = as_flags(run_options(server.base_url, None) | {"sandbox": "local"})
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(copy / "batch_runner.py"), *typed, cwd=elsewhere, stderr=asyncio.subprocess.PIPE
    )
    _, told = await process.communicate()
    assert process.returncode == 0, told
    (row,) = RunFiles(elsewhere / "data/run").rows
    assert orjson.loads(row["settings"]) == {"max_turns": 10}


@pytest.mark.parametrize("after_s", [0.5, 1.0, 1.6])
async def test_a_ctrl_c_in_the_terminal_while_workers_start_is_for_the_runner_alone(server, after_s):
    """It reaches every process of the group, the fork server in the middle of its imports too."""
    server.script = lambda request: say("late", delay_s=60)
    argv = [sys.executable, str(REPOSITORY / "batch_runner.py")]
    argv += as_flags(run_options(server.base_url, ["a", "b"]) | {"sandbox": "local", "grace_s": 0, "batch_size": 1})
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE, start_new_session=True)
    await asyncio.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, told = await process.communicate()
    assert (process.returncode, b"Traceback" in told) == (130, False), told
