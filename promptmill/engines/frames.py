"""Messages between the runner and a worker process: length-prefixed pickles over a socket pair.

Both ends are our own code on one machine; whatever models and tools produced travels inside as text or bytes.
"""

import asyncio
import pickle
import socket
from dataclasses import dataclass

from promptmill.limiter import GateOrder, GateReport
from promptmill.records import Batch, SampleResult, TurnEvent

_LENGTH_BYTES = 8
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has started and takes batches."""


@dataclass(frozen=True, slots=True)
class RowSaved:
    """The runner's answer to each `SampleResult`: the row is on disk."""

    number: int
    """The batch's."""
    go_on: bool
    """Whether the batch's next sample may start."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker's event loop goes round."""

    least_left_s: float
    """How soon the first of its conversations must have ended."""


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """All samples of a batch that could start have been sent."""

    number: int


@dataclass(frozen=True, slots=True)
class StopRun:
    """The worker met something that must stop the run."""

    error: Exception


Frame = (
    WorkerReady
    | Batch
    | SampleResult
    | TurnEvent
    | BatchFinished
    | StopRun
    | GateReport
    | GateOrder
    | RowSaved
    | Heartbeat
)


class _TolerantReader(asyncio.StreamReader):
    """Gives what had arrived before the connection broke, as before an orderly end."""

    def set_exception(self, exc: Exception) -> None:
        """The connection broke: a worker was killed, with rows of its on the way."""
        del exc
        self.feed_eof()


class FrameChannel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._length: int | None = None
        """Of the message whose header was read and whose rest was not."""

    @classmethod
    async def open(cls, end: socket.socket) -> "FrameChannel":
        """Take over a connected socket."""
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        reader = _TolerantReader(limit=_BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, sock=end)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def receive(self) -> Frame | None:
        """The next message, or None when the other end is gone. Cancelled between two parts, it loses neither."""
        try:
            if self._length is None:
                self._length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            payload = await self._reader.readexactly(self._length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self._length = None
        frame: Frame = pickle.loads(payload)
        return frame

    def post(self, frame: Frame) -> None:
        """Queue a message; it is dropped when the other end is gone."""
        if self._writer.is_closing():
            return
        payload = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)

    async def send(self, frame: Frame) -> None:
        """Queue a message, and wait while the other end is behind."""
        self.post(frame)
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    def end_sending(self) -> None:
        """Tell the other end that nothing more will come."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    async def close(self) -> None:
        """Close this end."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
