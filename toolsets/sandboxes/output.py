"""What a command prints, read as it comes and bounded, so that a gigabyte of it costs the host no memory."""

import asyncio
import fcntl
import os
import termios
from collections.abc import Callable

CHUNK_BYTES = 65_536
HEAD_SHARE = 0.4
"""Of what is kept, the part that comes from the start: an error is most often named at the end."""


class BoundedOutput:
    """Keeps the head and the tail of a stream and counts the middle."""

    def __init__(self, max_bytes: int, head_share: float = HEAD_SHARE) -> None:
        self.max_head_bytes = int(max_bytes * head_share)
        self.max_tail_bytes = max_bytes - self.max_head_bytes
        self.total_bytes = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total_bytes += len(chunk)
        room = self.max_head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        # Cut only now and then: each cut moves the whole tail.
        if len(self._tail) > 2 * self.max_tail_bytes + CHUNK_BYTES:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self.max_tail_bytes)]

    @property
    def head_bytes(self) -> int:
        """Length of the head, where the dropped middle was."""
        return len(self._head)

    @property
    def omitted_bytes(self) -> int:
        """How many bytes were dropped so far."""
        return self.total_bytes - len(self._head) - min(len(self._tail), self.max_tail_bytes)

    def kept(self) -> bytes:
        """Head and tail as one."""
        self._cut()
        return bytes(self._head + self._tail)


class OutputPipe:
    """The host's end of a command's output pipe, emptied by the event loop into a `BoundedOutput`."""

    def __init__(self, output: BoundedOutput) -> None:
        self.output = output
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._read_chunk)

    def _read_chunk(self) -> bool:
        """Read once; returns whether more may come. At the end of the stream the pipe is closed."""
        try:
            chunk = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            self.close()
            return False
        self.output.add(chunk)
        return True

    def finish(self, hand_over: Callable[[int], None]) -> None:
        """Take what the ended command left in the pipe, and no more of what others may still print into it.

        Args:
            hand_over: Given the descriptor when a process left in the background still holds the other end. Were the
                pipe just closed, that process would die of its next message.
        """
        if self._read_fd < 0:
            return
        waiting = int.from_bytes(fcntl.ioctl(self._read_fd, termios.FIONREAD, bytes(4)), "little")
        end = self.output.total_bytes + waiting
        while self._read_chunk() and self.output.total_bytes < end:
            continue
        if self._read_fd >= 0 and self._read_chunk():
            hand_over(self._read_fd)
            self.close()

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
