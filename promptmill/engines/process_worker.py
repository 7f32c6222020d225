"""What runs in a worker process: takes batches from the runner, sends finished samples back.

The process ends when the runner closes its end of the socket, whether on purpose or because it was killed: the event
loop then closes the sandboxes. A thread sees to it that it also ends when the event loop does not get there.
"""

import asyncio
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from multiprocessing import forkserver

from promptmill.config import WorkerSettings
from promptmill.engines.base import TERMINAL_SIGNALS
from promptmill.engines.frames import BatchFinished, FrameChannel, Heartbeat, RowSaved, StopRun, WorkerReady
from promptmill.errors import EngineError, Outcome, RunStoppedError
from promptmill.event_loop import run_in_loop
from promptmill.limiter import Gate, GateOrder
from promptmill.logs import log_to_stderr
from promptmill.records import Batch, SampleResult, TurnEvent
from promptmill.resources import raise_descriptor_limit
from promptmill.secrets import mask_of
from promptmill.worker import Worker

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
ORPHAN_GRACE_S = 5.0
"""How long the event loop may take to close its sandboxes when the runner is gone."""
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def process_main(settings: WorkerSettings, end: socket.socket) -> None:
    """Serve the runner until it closes its end of the socket; does not return."""
    # A Ctrl-C or a `kill` of the whole group is for the runner to act on: it tells its workers by closing the socket.
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # They are blocked where we come from (see `process_context`), and tools must not inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)
    end_with_runner(end, ORPHAN_GRACE_S)
    raise_descriptor_limit()
    log_to_stderr(mask_of(settings.config.secrets))
    run_in_loop(_serve(settings, end))
    # Everything is handed on and closed; skipping interpreter shutdown saves its time in every run.
    os._exit(0)


def end_with_runner(end: socket.socket, grace_s: float) -> None:
    """End this process at the latest so long after the runner has gone, whatever its event loop is doing by then."""
    if sys.platform == "linux":
        # Should we be stopped then, the end of our parent wakes us: the fork server ends with the last process that
        # has this descriptor, which the runner has, and which is ours only to have it start processes.
        alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
        if alive is not None:
            os.close(alive)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_exit_after_hang_up, args=(end.fileno(), grace_s), daemon=True).start()


def _exit_after_hang_up(descriptor: int, grace_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is told unasked; that the runner has only ended its sending is none
    poll.poll()
    time.sleep(grace_s)
    os._exit(1)


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
    beating = asyncio.create_task(_beat(worker, channel))
    try:
        while (frame := await channel.receive()) is not None:
            if isinstance(frame, GateOrder):
                gate.obey(frame)
            elif isinstance(frame, RowSaved):
                events.row_saved(frame)
            elif isinstance(frame, Batch):
                task = asyncio.create_task(_run_batch(worker, frame, channel))
                running.add(task)
                task.add_done_callback(running.discard)
    finally:
        for task in (beating, *running):
            task.cancel()
        await asyncio.gather(beating, *running, return_exceptions=True)
        await worker.close()
        await channel.close()


async def _beat(worker: Worker, channel: FrameChannel) -> None:
    """Show the runner that the event loop goes round."""
    while True:
        channel.post(Heartbeat(worker.least_left_s))
        await asyncio.sleep(HEARTBEAT_S)


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
        self._unsaved: dict[int, asyncio.Future[bool]] = {}
        """Batch number -> the runner's answer to its last row."""

    async def sample_finished(self, result: SampleResult) -> bool:
        if result.summary.outcome is Outcome.INTERRUPTED:
            await self._channel.send(result)
            return False  # the worker is ending, and waits for nobody's answer
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unsaved[result.batch_number] = answer
        await self._channel.send(result)
        return await answer

    def row_saved(self, frame: RowSaved) -> None:
        """Hand on what the runner answered; nobody waits for it where a sample was interrupted."""
        answer = self._unsaved.pop(frame.number, None)
        if answer is not None and not answer.done():
            answer.set_result(frame.go_on)

    async def batch_finished(self, number: int) -> None:
        await self._channel.send(BatchFinished(number))

    def turn(self, event: TurnEvent) -> None:
        self._channel.post(event)
