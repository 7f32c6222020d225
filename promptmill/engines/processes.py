"""Workers in processes of our own, each with an event loop in which its share of the batches overlaps.

Not `multiprocessing.Pool`, which waits for ever when a child dies, nor ProcessPoolExecutor, which breaks whole. Here a
worker's socket ends when the worker does: that is seen at once, the worker is replaced, and what it had in flight is
run again, each sample with no other beside it. One that is then in flight in a second worker that dies is failed.
A worker that is silent for longer than its conversations have left is killed, and then is one that died.

A batch waits for the runner's word that its row is on disk before it goes on, so a runner that stalls and is then
killed loses no more rows than it had batches in flight. The rows of different batches are saved together.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from promptmill.config import environment, environment_with
from promptmill.engines.base import TERMINAL_SIGNALS, Engine, new_limit
from promptmill.engines.frames import BatchFinished, FrameChannel, Heartbeat, RowSaved, StopRun, WorkerReady
from promptmill.engines.process_entry import process_entry
from promptmill.errors import EngineError
from promptmill.finished import finished_sample, unstarted
from promptmill.limiter import GateOrder, GateReport, LimitKeeper
from promptmill.records import Batch, RunEvents, Sample, SampleResult, TurnEvent

MAX_DEATHS_OF_A_SAMPLE = 2
MAX_FAILED_STARTS = 3
END_GRACE_S = 10.0
"""How long a worker may take to close its sandboxes before it is killed."""
ANSWER_MARGIN_S = 30.0
"""How much longer than its conversations have left a worker may be silent: so long a busy machine never takes."""
LOOK_S = 1.0
PROJECT_ROOT = Path(__file__).resolve().parents[2]
"""Where this package is imported from."""
MAX_TEMPORARY_PATH_BYTES = 75
"""The fork server's socket lies 32 bytes deeper, and a socket's path has at most 107."""


class Backlog:
    """Batches not yet given to a worker: those of dead workers first, then the run's own."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._again: deque[Batch] = deque()
        self._batches = batches

    def take(self) -> Batch | None:
        """The next batch, or None when there is none now."""
        return self._again.popleft() if self._again else next(self._batches, None)

    def give_back(self, batch: Batch) -> None:
        """Queue what a dead worker left of a batch."""
        self._again.append(batch)


@dataclass(slots=True)
class Lane:
    """A place for one worker process, refilled when its worker dies."""

    place: int
    slots: int
    """Batches that overlap in it."""
    first: deque[Batch] = field(default_factory=deque)
    """Batches dealt to it at the start, so that few batches are spread over all lanes."""
    in_flight: dict[int, deque[Sample]] = field(default_factory=dict)
    """Batch number -> samples not yet finished; the first of them is the one that runs, unless the batch rests."""
    resting: set[int] = field(default_factory=set)
    """Batches none of whose samples runs: their last row is being saved, or the next may not start."""
    granted: int | None = None
    """The batch that may start already, though its worker is still being started."""
    channel: FrameChannel | None = None
    """To the present worker."""
    is_ready: bool = False
    """Whether the present worker has started."""
    failed_starts: int = 0
    """Workers in a row that died before they had started."""
    silent_s: float = 0.0
    """How long nothing was heard of the present worker."""
    least_left_s: float = 0.0
    """How soon the first of its conversations must have ended, when it last told."""


class ProcessEngine(Engine):
    """`num_workers` batches on `min(num_workers, max(4, CPUs))` processes."""

    answer_margin_s = ANSWER_MARGIN_S

    async def run(self, batches: Iterator[Batch], events: RunEvents) -> None:
        self._backlog = Backlog(batches)
        self._events = events
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._context = process_context()
        self._endings: list[asyncio.Future[None]] = []
        self._begun: set[asyncio.Future[bool]] = set()
        """Rows that are being saved."""
        lanes = self._deal()
        self._lanes = {lane.place: lane for lane in lanes}
        slots = {lane.place: lane.slots for lane in lanes}
        self._keeper = LimitKeeper(new_limit(self.settings), slots, events.limit_changed)
        tasks = [asyncio.create_task(self._run_lane(lane)) for lane in lanes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                # A task that is being cancelled is tidying up: a second cancel would break that off.
                if not task.cancelling():
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._endings, return_exceptions=True)
            await asyncio.gather(*self._begun, return_exceptions=True)

    def _deal(self) -> list[Lane]:
        """Lanes for the run, the first batches dealt to them one by one; lanes without a batch are left out."""
        workers = self.settings.config.num_workers
        count = min(workers, max(4, os.cpu_count() or 1))
        lanes = [Lane(place, slots=workers // count + (place < workers % count)) for place in range(count)]
        for turn in range(lanes[0].slots):
            for lane in (lane for lane in lanes if turn < lane.slots):
                if batch := self._backlog.take():
                    lane.first.append(batch)
        return [lane for lane in lanes if lane.first]

    async def _run_lane(self, lane: Lane) -> None:
        while (batch := self._next_batch(lane)) and self._events.may_start(batch.number):
            # Asked before its worker is started, lest that is for nothing, and not asked again once it is there.
            lane.first.appendleft(batch)
            lane.granted = batch.number
            if not await self._run_worker(lane):
                await self._bury(lane)

    def _next_batch(self, lane: Lane) -> Batch | None:
        return lane.first.popleft() if lane.first else self._backlog.take()

    async def _run_worker(self, lane: Lane) -> bool:
        """Run one worker process until the lane's work is done (True) or the process has died (False)."""
        settings = replace(self.settings, conversations=lane.slots)
        try:
            ours, theirs = socket.socketpair()
            process = self._context.Process(target=process_entry, args=(settings, theirs), daemon=True)
            await asyncio.to_thread(process.start)
        except (OSError, EOFError) as exc:
            raise EngineError(f"cannot start a worker process: {exc}; see `ulimit -n` and `ulimit -u`") from exc
        theirs.close()
        channel = await FrameChannel.open(ours)
        watching = asyncio.create_task(self._watch(lane, process))
        try:
            return await self._serve(lane, channel)
        finally:
            watching.cancel()
            self._pass_on(self._keeper.gone(lane.place))
            # Cancelled while it waits, it goes on, and the run waits for it (see `run`).
            ending = asyncio.ensure_future(self._end(process, channel))
            self._endings.append(ending)
            await asyncio.shield(ending)

    async def _serve(self, lane: Lane, channel: FrameChannel) -> bool:
        """Give a worker batches and take what it sends, until the lane's work is done (True) or it has died (False)."""
        lane.is_ready, lane.channel = False, channel
        channel.post(self._keeper.first_share(lane.place))
        self._fill(lane, channel)
        try:
            # Its end waits for the rows that are being saved: those of a worker that has died count.
            async with asyncio.TaskGroup() as saving:
                return await self._take_frames(lane, channel, saving)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first, for which the others were cancelled

    async def _take_frames(self, lane: Lane, channel: FrameChannel, saving: asyncio.TaskGroup) -> bool:
        while lane.in_flight:
            frame = await channel.receive()
            lane.silent_s = 0.0
            match frame:
                case None:
                    lane.channel = None
                    return False
                case WorkerReady():
                    lane.is_ready, lane.failed_starts = True, 0
                case Heartbeat(least_left_s):
                    lane.least_left_s = least_left_s
                case SampleResult() as result:
                    lane.in_flight[result.batch_number].popleft()
                    lane.resting.add(result.batch_number)
                    saving.create_task(self._save(lane, channel, result, self._begin_to_save(result)))
                    self._fill(lane, channel)
                case BatchFinished(number):
                    del lane.in_flight[number]
                    lane.resting.discard(number)
                    saving.create_task(self._events.batch_finished(number))
                    self._fill(lane, channel)
                case GateReport() as report:
                    self._pass_on(self._keeper.take(lane.place, report))
                case TurnEvent() as event:
                    self._events.turn(event)
                case StopRun(error):
                    raise error
        return True

    def _begin_to_save(self, result: SampleResult) -> asyncio.Future[bool]:
        """Have a row saved, whatever ends the run: a task of the group may be cancelled before it has begun."""
        begun = asyncio.ensure_future(self._events.sample_finished(result))
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        return begun

    async def _save(self, lane: Lane, channel: FrameChannel, result: SampleResult, begun: asyncio.Future[bool]) -> None:
        """Wait for a row to be saved, and tell its worker, which waits with the batch's next sample."""
        go_on = await asyncio.shield(begun)
        if lane.channel is channel:
            if go_on:
                lane.resting.discard(result.batch_number)
            channel.post(RowSaved(result.batch_number, go_on))

    async def _watch(self, lane: Lane, process: BaseProcess) -> None:
        """Kill a worker that does not answer: one that is stopped, or whose event loop is held up for ever."""
        lane.silent_s, lane.least_left_s = 0.0, self.settings.config.agent.prompt_timeout_s
        while lane.silent_s <= lane.least_left_s + self.answer_margin_s:
            await asyncio.sleep(LOOK_S)
            # Counted by looks, not by the clock: while we are stopped ourselves (Ctrl-Z), nobody is heard.
            lane.silent_s += LOOK_S
        told = f"worker process {process.pid} did not answer for {lane.silent_s:.0f} s"
        self._events.note(f"{told}: killed, its prompts are run again")
        kill(process)

    def _pass_on(self, orders: Mapping[int, GateOrder]) -> None:
        for place, order in orders.items():
            channel = self._lanes[place].channel
            if channel is not None:
                channel.post(order)

    def _fill(self, lane: Lane, channel: FrameChannel) -> None:
        """Give the worker batches for its free slots. A sample that saw a worker die runs with no other beside it."""
        while len(lane.in_flight) < lane.slots and not any(map(self._is_suspect, lane.in_flight.values())):
            batch = self._next_batch(lane)
            if batch is None:
                return
            if lane.in_flight and self._is_suspect(batch.samples):
                lane.first.appendleft(batch)
                return
            if batch.number != lane.granted and not self._events.may_start(batch.number):
                return  # once no, always no: its samples stay owed
            lane.granted = None
            lane.in_flight[batch.number] = deque(batch.samples)
            channel.post(batch)

    def _is_suspect(self, samples: Sequence[Sample]) -> bool:
        """Whether the first of a batch's samples was in flight in a worker that died."""
        return bool(samples) and self._deaths[identity_of(samples[0])] > 0

    async def _end(self, process: BaseProcess, channel: FrameChannel) -> None:
        """Let the worker finish what it has begun to send, save that, and see the worker gone."""
        channel.end_sending()
        killing = asyncio.get_running_loop().call_later(END_GRACE_S, kill, process)
        saving = []
        while (frame := await channel.receive()) is not None:
            if isinstance(frame, SampleResult):
                saving.append(asyncio.ensure_future(self._events.sample_finished(frame)))
        await asyncio.to_thread(process.join)
        killing.cancel()
        await channel.close()
        # What is refused now is no news for the run, which is ending; whoever saves remembers it.
        await asyncio.gather(*saving, return_exceptions=True)

    async def _bury(self, lane: Lane) -> None:
        """Queue again what a dead worker had, and fail samples that were in flight in two dead workers.

        Raises:
            EngineError: workers die before they have started.
        """
        lane.failed_starts += not lane.is_ready
        if lane.failed_starts >= MAX_FAILED_STARTS:
            raise EngineError("worker processes die while they start; run with --engine=inline to see why")
        left, lane.in_flight = lane.in_flight, {}
        resting, lane.resting = lane.resting, set()
        for number, samples in left.items():
            if samples and lane.is_ready and number not in resting:
                await self._blame(samples, number)
            if samples:
                self._backlog.give_back(Batch(number, tuple(samples)))
            else:
                await self._events.batch_finished(number)

    async def _blame(self, samples: deque[Sample], batch_number: int) -> None:
        """Count a death against the sample that was running; fail it when it is the second."""
        sample = samples[0]
        self._deaths[identity_of(sample)] += 1
        if self._deaths[identity_of(sample)] < MAX_DEATHS_OF_A_SAMPLE:
            return
        samples.popleft()
        config = self.settings.config
        error = f"{MAX_DEATHS_OF_A_SAMPLE} worker processes died while this prompt ran"
        result = unstarted(config, sample, "worker_died", error)
        await self._events.sample_finished(finished_sample(config, result, sample, batch_number))


def identity_of(sample: Sample) -> tuple[str, int]:
    """What a sample is known by."""
    return sample.content_hash, sample.occurrence


def kill(process: BaseProcess) -> None:
    """Kill a worker whose end nobody has collected. Its own `kill` does nothing once the fork server is gone."""
    assert process.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def process_context() -> ForkServerContext | SpawnContext:
    """A warm fork server where there can be one (it has the imports done), else fresh interpreters."""
    has_room = len(os.fsencode(tempfile.gettempdir())) <= MAX_TEMPORARY_PATH_BYTES
    if "forkserver" not in multiprocessing.get_all_start_methods() or not has_room:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["promptmill.engines.process_worker"])
    # Left alone it would import what the current folder or an installed package of our name holds, and not us.
    path = os.pathsep.join([str(PROJECT_ROOT), *filter(None, [environment().get("PYTHONPATH")])])
    # It inherits what is blocked here: a Ctrl-C in the terminal is for the runner alone. Workers unblock it again.
    resource_tracker.ensure_running()  # first: to start it unblocks them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        with environment_with(PYTHONPATH=path, PYTHONSAFEPATH="1"):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context
