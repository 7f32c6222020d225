"""What runs in a worker process: takes batches from the runner, sends finished samples back.

The process ends when the runner closes its end of the socket, whether on purpose or because it was killed.
"""

import asyncio
import logging
import os
import signal
import socket

from promptmill.config import WorkerSettings
from promptmill.engines.frames import BatchFinished, FrameChannel, StartAnswered, StartAsked, StopRun, WorkerReady
from promptmill.errors import EngineError, RunStoppedError
from promptmill.event_loop import run_in_loop
from promptmill.limiter import Gate, GateOrder
from promptmill.logs import log_to_stderr
from promptmill.records import Batch, SampleResult, TurnEvent
from promptmill.resources import raise_descriptor_limit
from promptmill.secrets import mask_of
from promptmill.worker import Worker

logger = logging.getLogger(__name__)


def process_main(settings: WorkerSettings, end: socket.socket) -> None:
    """Serve the runner until it closes its end of the socket; does not return."""
    # A Ctrl-C or a `kill` of the whole group is for the runner to act on: it tells its workers by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_descriptor_limit()
    log_to_stderr(mask_of(settings.config.secrets))
    run_in_loop(_serve(settings, end))
    # Everything is handed on and closed; skipping interpreter shutdown saves its time in every run.
    os._exit(0)


async def _serve(settings: WorkerSettings, end: socket.socket) -> None:
    channel = await FrameChannel.open(end)
    try:
        gate = Gate(settings.conversations, report=channel.post)
        events = _ChannelEvents(channel)
        worker = Worker(settings, events, gate)
    except Exception as exc:  # the next worker would fail alike: the runner must say why, not try again
        logger.exception("worker process %d", os.getpid())
        await channel.send(StopRun(EngineError(f"a worker cannot start: {type(exc).__name__}: {exc}")))
        await channel.close()
        return
    running: set[asyncio.Task[None]] = set()
    channel.post(WorkerReady())
    try:
        while (frame := await channel.receive()) is not None:
            if isinstance(frame, GateOrder):
                gate.obey(frame)
            elif isinstance(frame, StartAnswered):
                events.answered(frame)
            elif isinstance(frame, Batch):
                task = asyncio.create_task(_run_batch(worker, frame, channel))
                running.add(task)
                task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await worker.close()
        await channel.close()


async def _run_batch(worker: Worker, batch: Batch, channel: FrameChannel) -> None:
    try:
        await worker.run_batch(batch)
    except RunStoppedError as exc:
        await channel.send(StopRun(type(exc)(str(exc))))
    except Exception as exc:  # a fault of ours, outside any sample: silence here would be a batch that never ends
        logger.exception("batch %d", batch.number)
        await channel.send(StopRun(EngineError(f"batch {batch.number}: {type(exc).__name__}: {exc}")))


class _ChannelEvents:
    """Sends what a worker finishes to the runner."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self._asked: dict[int, asyncio.Future[bool]] = {}

    async def may_start(self, batch_number: int) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[batch_number] = answer
        self._channel.post(StartAsked(batch_number))
        return await answer

    def answered(self, frame: StartAnswered) -> None:
        """Hand on what the runner said."""
        answer = self._asked.pop(frame.number)
        if not answer.done():
            answer.set_result(frame.allowed)

    async def sample_finished(self, result: SampleResult) -> None:
        await self._channel.send(result)

    async def batch_finished(self, number: int) -> None:
        await self._channel.send(BatchFinished(number))

    def turn(self, event: TurnEvent) -> None:
        self._channel.post(event)
