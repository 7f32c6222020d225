"""Workers in processes of our own, each with an event loop in which its share of the batches overlaps.

Not `multiprocessing.Pool`, which waits for ever when a child dies, nor ProcessPoolExecutor, which breaks whole. Here a
worker's socket ends when the worker does: that is seen at once, the worker is replaced, and what it had in flight is
run again, each sample with no other beside it. One that is then in flight in a second worker that dies is failed.
"""

import asyncio
import multiprocessing
import os
import socket
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext, SpawnContext

from promptmill.engines.base import Engine, new_limit
from promptmill.engines.frames import BatchFinished, FrameChannel, StartAnswered, StartAsked, StopRun, WorkerReady
from promptmill.engines.process_entry import process_entry
from promptmill.errors import EngineError, RunStoppedError
from promptmill.finished import finished_sample, unstarted
from promptmill.limiter import GateOrder, GateReport, LimitKeeper
from promptmill.records import Batch, RunEvents, Sample, SampleResult, TurnEvent

MAX_DEATHS_OF_A_SAMPLE = 2
MAX_FAILED_STARTS = 3
END_GRACE_S = 10.0
"""How long a worker may take to close its sandboxes before it is killed."""
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
    """Batch number -> samples not yet finished; the first of them is the one that runs."""
    channel: FrameChannel | None = None
    """To the present worker."""
    is_ready: bool = False
    """Whether the present worker has started."""
    failed_starts: int = 0
    """Workers in a row that died before they had started."""


class ProcessEngine(Engine):
    """`num_workers` batches on `min(num_workers, max(4, CPUs))` processes."""

    async def run(self, batches: Iterator[Batch], events: RunEvents) -> None:
        self._backlog = Backlog(batches)
        self._events = events
        self._deaths: Counter[tuple[str, int]] = Counter()
        self._context = process_context()
        self._endings: list[asyncio.Future[None]] = []
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
        while batch := self._next_batch(lane):
            lane.first.appendleft(batch)
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
        except OSError as exc:
            raise EngineError(f"cannot start a worker process: {exc}; see `ulimit -n` and `ulimit -u`") from exc
        theirs.close()
        channel = await FrameChannel.open(ours)
        try:
            return await self._serve(lane, channel)
        finally:
            # Cancelled while it waits, it goes on, and the run waits for it (see `run`).
            ending = asyncio.ensure_future(self._end(process, channel))
            self._endings.append(ending)
            await asyncio.shield(ending)

    async def _serve(self, lane: Lane, channel: FrameChannel) -> bool:
        lane.is_ready, lane.channel = False, channel
        channel.post(self._keeper.first_share(lane.place))
        self._fill(lane, channel)
        while lane.in_flight:
            match await channel.receive():
                case None:
                    return False
                case WorkerReady():
                    lane.is_ready, lane.failed_starts = True, 0
                case SampleResult() as result:
                    lane.in_flight[result.batch_number].popleft()
                    await self._events.sample_finished(result)
                    self._fill(lane, channel)
                case StartAsked(number):
                    channel.post(StartAnswered(number, await self._events.may_start(number)))
                case BatchFinished(number):
                    del lane.in_flight[number]
                    await self._events.batch_finished(number)
                    self._fill(lane, channel)
                case GateReport() as report:
                    self._pass_on(self._keeper.take(lane.place, report))
                case TurnEvent() as event:
                    self._events.turn(event)
                case StopRun(error):
                    raise error
        return True

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
            lane.in_flight[batch.number] = deque(batch.samples)
            channel.post(batch)

    def _is_suspect(self, samples: Sequence[Sample]) -> bool:
        """Whether the first of a batch's samples was in flight in a worker that died."""
        return bool(samples) and self._deaths[identity_of(samples[0])] > 0

    async def _end(self, process: multiprocessing.process.BaseProcess, channel: FrameChannel) -> None:
        """Let the worker finish what it has begun to send, then see it gone, even if the run refuses what comes."""
        channel.end_sending()
        refusal: RunStoppedError | None = None
        try:
            async with asyncio.timeout(END_GRACE_S):
                while (frame := await channel.receive()) is not None:
                    if isinstance(frame, SampleResult) and refusal is None:
                        try:
                            await self._events.sample_finished(frame)
                        except RunStoppedError as exc:
                            refusal = exc
        except TimeoutError:
            process.kill()
        await asyncio.to_thread(process.join, END_GRACE_S)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)
        await channel.close()
        if refusal is not None:
            raise refusal

    async def _bury(self, lane: Lane) -> None:
        """Queue again what a dead worker had, and fail samples that were in flight in two dead workers.

        Raises:
            EngineError: workers die before they have started.
        """
        lane.failed_starts += not lane.is_ready
        if lane.failed_starts >= MAX_FAILED_STARTS:
            raise EngineError("worker processes die while they start; run with --engine=inline to see why")
        left, lane.in_flight = lane.in_flight, {}
        for number, samples in left.items():
            if samples and lane.is_ready:
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


def process_context() -> ForkServerContext | SpawnContext:
    """A warm fork server where there can be one (it has the imports done), else fresh interpreters."""
    has_room = len(os.fsencode(tempfile.gettempdir())) <= MAX_TEMPORARY_PATH_BYTES
    if "forkserver" not in multiprocessing.get_all_start_methods() or not has_room:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["promptmill.engines.process_worker"])
    return context
