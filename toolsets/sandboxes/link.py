"""The host's end of a supervisor: requests out, replies in, jobs in flight.

One descriptor per sandbox, no thread and no child watcher: replies are read by the event loop's reader callback.
Whatever arrives may have been written by a hostile command, so it is bounded, validated, and never trusted: nonsense
ends the sandbox and nothing else.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolsets.sandboxes.base import SandboxError
from toolsets.sandboxes.output import OutputPipe

MAX_REPLY_BYTES = 1_024
MAX_LAST_WORDS_BYTES = 4_096
KILL_GRACE_S = 10.0
"""How long a killed job may take to end before the sandbox counts as lost."""
_REPLY = re.compile(rb"(started|ended) ([0-9]{1,9}) (-?[0-9]{1,9})")


class Job:
    """A command or file operation in flight."""

    def __init__(self, job_id: int, pipe: OutputPipe | None) -> None:
        loop = asyncio.get_running_loop()
        self.id = job_id
        self.pipe = pipe
        self.started: asyncio.Future[int] = loop.create_future()
        """The process id inside, when the request asked for it; 0 when the job ended without telling one."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """Exit status, or the negated number of the signal that ended it."""
        self.expired = False
        """Whether its deadline passed."""
        self.kill_deadline: asyncio.TimerHandle | None = None

    def lose(self, error: SandboxError) -> None:
        """The sandbox is gone, and this job with it."""
        for future in (self.started, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # asyncio complains of an exception that nobody has looked at
        if self.pipe is not None:
            self.pipe.close()


class SupervisorLink:
    """A running supervisor, as the host sees it."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            name: The backend, for messages.
            argv: Its command line. It gets the socket as standard input and error.
            environment: All of its environment.

        Raises:
            SandboxError: it cannot be started.
        """
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._job_by_id: dict[int, Job] = {}
        self._next_id = 0
        self._last_words = b""
        self.failure: SandboxError | None = None
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the supervisor has closed its end, which only its death does."""
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:
            raise SandboxError(f"{name}: no socket for a new sandbox: {exc}; see `ulimit -n`") from exc
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=theirs.fileno(),
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as exc:
            self._socket.close()
            raise SandboxError(f"{name}: cannot start {argv[0]}: {exc}") from exc
        finally:
            theirs.close()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    # ── replies ───────────────────────────────────────────────────────────────────────────────────────────────

    def _on_readable(self) -> None:
        try:
            packet = self._socket.recv(MAX_REPLY_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._socket.fileno())
            self._fail(self._describe_end())
            self.gone.set_result(None)
        elif self.failure is not None:
            return
        elif len(packet) > MAX_REPLY_BYTES:
            self._fail_hostile("answers nonsense")
        elif packet == b"ready" and not self.ready.done():
            self.ready.set_result(None)
        elif match := _REPLY.fullmatch(packet):
            self._on_reply(match[1], int(match[2]), int(match[3]))
        else:
            self._last_words += packet
            if len(self._last_words) > MAX_LAST_WORDS_BYTES:
                self._fail_hostile("answers nonsense")

    def _on_reply(self, verb: bytes, job_id: int, value: int) -> None:
        job = self._job_by_id.get(job_id)
        if job is None:
            self._fail_hostile("answers for a command that does not run")
        elif verb == b"started" and value > 0 and not job.started.done():
            job.started.set_result(value)
        elif verb == b"ended" and -64 <= value <= 255:
            del self._job_by_id[job_id]
            if job.kill_deadline is not None:
                job.kill_deadline.cancel()
            if job.pipe is not None:
                job.pipe.finish(self._drain)
            if not job.started.done():
                job.started.set_result(0)
            if not job.ended.done():
                job.ended.set_result(value)
        else:
            self._fail_hostile("answers nonsense")

    def _drain(self, fd: int) -> None:
        with contextlib.suppress(SandboxError):  # then there is nobody left whose output could be drained
            self._send([b"drain"], [fd])

    def _describe_end(self) -> str:
        words = self._last_words.decode(errors="replace").strip()
        what = "ended unexpectedly" if self.ready.done() else "could not start"
        return f"{what}: {words[-1_000:]}" if words else what

    def _fail(self, what: str) -> None:
        """End every job in flight, and make every later request fail at once."""
        if self.failure is None:
            self.failure = SandboxError(f"{self._name} sandbox {what}")
        if not self.ready.done():
            self.ready.set_exception(self.failure)
            self.ready.exception()
        jobs = list(self._job_by_id.values())
        self._job_by_id.clear()
        for job in jobs:
            job.lose(self.failure)

    def _fail_hostile(self, what: str) -> None:
        """A supervisor that answers nonsense is not ours any more, and would not end by itself."""
        self._fail(what)
        self._kill()

    def _kill(self) -> None:
        """Kill the supervisor and what it has started. It may be a grandchild: bubblewrap stays between."""
        family = [self.process.pid]
        for pid in family:
            family.extend(children_of(pid))
        self.process.kill()
        for pid in family[1:]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, verb: bytes, fields: Sequence[bytes], pipe: OutputPipe | None, fds: Sequence[int]) -> Job:
        """Ask for a job.

        Args:
            verb: `run`, `read` or `write`.
            fields: What follows the job's id in the request.
            pipe: Where its output goes; the writing end is handed over, and closed here.
            fds: Further descriptors for the job. They stay the caller's.

        Raises:
            SandboxError: the sandbox is lost or closed.
        """
        job = Job(self._next_id, pipe)
        self._next_id += 1
        self._job_by_id[job.id] = job
        output_fds = [] if pipe is None else [pipe.write_fd]
        try:
            self._send([verb, b"%d" % job.id, *fields], [*output_fds, *fds])
        except SandboxError as exc:
            self._job_by_id.pop(job.id, None)
            job.lose(exc)
            raise
        finally:
            if pipe is not None:
                os.close(pipe.write_fd)
        return job

    def _send(self, fields: Sequence[bytes], fds: Sequence[int] = ()) -> None:
        if self.failure is None:
            try:
                socket.send_fds(self._socket, [b"\0".join(fields)], list(fds))
            except OSError as exc:
                # A full socket means that it has not read for hundreds of requests: it is stopped, or stuck.
                self._fail(f"does not take requests: {exc.strerror}")
        if self.failure is not None:
            raise self.failure

    def kill(self, job: Job) -> None:
        """Kill a job's processes. Does not wait for `job.ended`, but sees to it that it comes."""
        if job.id not in self._job_by_id or job.kill_deadline is not None:
            return
        try:
            self._send([b"kill", b"%d" % job.id])
        except SandboxError:
            return  # which has ended every job
        job.kill_deadline = self._loop.call_later(KILL_GRACE_S, self._give_up_on, job)

    def _give_up_on(self, job: Job) -> None:
        if job.id in self._job_by_id:
            self._fail(f"cannot kill a command within {KILL_GRACE_S:g} seconds")

    def expire(self, job: Job) -> None:
        """The job's deadline has passed."""
        job.expired = True
        self.kill(job)

    # ── end ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def shut_down(self, grace_s: float) -> bool:
        """Have the supervisor end everything, itself included.

        Returns:
            Whether it did so by itself. If not it was killed, and processes of its may be left where no namespace
            ends with it.
        """
        orderly = self.failure is None
        self._fail("is closed")
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            orderly = False
        # One that was given up is not asked again, and one that never was ready may be bubblewrap, which does not read.
        answers = orderly and self.ready.exception() is None
        if not await self._wait_until_gone(grace_s if answers else 0):
            orderly = False
            self._kill()
            await self._wait_until_gone(grace_s)
        if not self.gone.done():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self.process.poll() is None:
            await self._loop.run_in_executor(None, self.process.wait)
        return orderly

    async def _wait_until_gone(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self.gone], timeout=timeout_s)
        return bool(done)


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
