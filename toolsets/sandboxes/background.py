"""A process that goes on while the agent does other things, as a job of the supervisor."""

import asyncio
import errno
import os

from toolsets.sandboxes.base import BackgroundProcess
from toolsets.sandboxes.link import Job, SupervisorLink
from toolsets.sandboxes.output import BoundedOutput


class SupervisedProcess(BackgroundProcess):
    """A job whose output is kept as it comes, and whose standard input is a pipe that we hold."""

    def __init__(self, link: SupervisorLink, job: Job, output: BoundedOutput, stdin_fd: int) -> None:
        self._link = link
        self._job = job
        self._output = output
        self._stdin_fd = stdin_fd
        self._writable: asyncio.Future[None] | None = None
        self.pid = 0
        job.ended.add_done_callback(lambda _: self._close_stdin())

    @property
    def returncode(self) -> int | None:
        ended = self._job.ended
        if not ended.done():
            return None
        return exit_status(-9 if ended.exception() is not None else ended.result())

    def output(self) -> tuple[bytes, int]:
        kept = self._output.kept()
        return kept, self._output.total_bytes - len(kept)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._stdin_fd < 0:
                raise BrokenPipeError(errno.EPIPE, "standard input is closed")
            try:
                view = view[os.write(self._stdin_fd, view) :]
            except BlockingIOError:
                await self._wait_until_writable()

    async def _wait_until_writable(self) -> None:
        loop, fd = asyncio.get_running_loop(), self._stdin_fd
        self._writable = loop.create_future()
        loop.add_writer(fd, self._on_writable)
        try:
            await self._writable
        finally:
            if fd == self._stdin_fd:
                loop.remove_writer(fd)

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _close_stdin(self) -> None:
        if self._stdin_fd >= 0:
            asyncio.get_running_loop().remove_writer(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = -1
            self._on_writable()

    async def close_stdin(self) -> None:
        self._close_stdin()

    async def kill(self) -> None:
        self._link.kill(self._job)
        await asyncio.wait([self._job.ended])
        self._close_stdin()

    async def wait(self, timeout_s: float) -> bool:
        await asyncio.wait([self._job.ended], timeout=timeout_s)
        return self._job.ended.done()


def exit_status(code: int) -> int:
    """What a shell would call it: 128 + N for an end by signal N."""
    return 128 - code if code < 0 else code
