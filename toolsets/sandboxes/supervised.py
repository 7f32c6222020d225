"""What the backends with a supervisor share: all of a sandbox but how its supervisor is started.

A backend gives the folders, the environment and the supervisor's command line. Commands, background processes and file
access then are jobs of that supervisor, and end with it.
"""

import asyncio
import contextlib
import errno
import functools
import importlib.util
import marshal
import os
import pwd
import re
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolsets.sandboxes.background import SupervisedProcess, exit_status
from toolsets.sandboxes.base import (
    BASE_ENVIRONMENT,
    BackgroundProcess,
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxSpec,
)
from toolsets.sandboxes.inside_files import REMOVE_BY_FORCE, empty_folder
from toolsets.sandboxes.link import Job, SupervisorLink
from toolsets.sandboxes.output import BoundedOutput, OutputPipe

ROOT_PREFIX = "promptmill-"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_RETURNCODE = 124
START_TIMEOUT_S = 60.0
CLOSE_GRACE_S = 30.0
FILE_TIMEOUT_S = 60.0
"""Some files that call themselves regular never answer (in /proc, or of a server that is gone)."""
MAX_INLINE_COMMAND_BYTES = 8_192
"""A longer command travels as a file: the kernel refuses an argument over 128 KiB."""
MAX_PATH_BYTES = 4_095
WRITE_CHUNK_BYTES = 1_048_576
MAX_LABEL_CHARS = 60


def start_time(pid: int) -> str:
    """When a process was started, in clock ticks since boot; empty when there is none of that number."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


@functools.cache
def own_mark() -> str:
    """This process, in the names of its sandboxes' folders, so that a later one can tell whether it still lives."""
    return f"{os.getpid()}.{start_time(os.getpid())}"


def sweep_abandoned() -> int:
    """Remove the folders of sandboxes whose runner was killed; returns how many.

    Only those of this user are touched, and only when no process of that number and start time lives.
    """
    swept = 0
    for root in Path(tempfile.gettempdir()).glob(f"{ROOT_PREFIX}*"):
        match = re.match(rf"{ROOT_PREFIX}(\d+)\.(\d+)-", root.name)
        if match is None or start_time(int(match[1])) == match[2]:
            continue
        with contextlib.suppress(OSError):
            if root.lstat().st_uid == os.getuid() and not root.is_symlink():
                remove_tree(root)
                swept += not root.exists()
    return swept


def sandbox_path() -> str:
    """PATH inside: the system's folders, then the runner's own interpreter."""
    interpreters = f"{sys.base_prefix}/bin"
    return SYSTEM_PATH if interpreters in SYSTEM_PATH.split(":") else f"{SYSTEM_PATH}:{interpreters}"


def supervisor_argv(*words: str) -> list[str]:
    """Command line of an interpreter that starts fast: isolated, with no site packages, writing no bytecode."""
    return [str(Path(sys.executable).resolve()), "-I", "-S", "-B", *words]


@functools.cache
def supervisor_bytecode() -> bytes:
    """The supervisor's modules as one .pyc file: compiling them for each sandbox would take a third of its start."""
    folder = Path(__file__).parent
    modules = []
    for name, file in ((f"{__package__}.inside_files", "inside_files.py"), ("__main__", "supervisor.py")):
        source = folder / file
        code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=2)
        modules.append((name, code))
    boot = f"""import marshal, sys
for name, code in marshal.loads({marshal.dumps(modules)!r}):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
"""
    no_checks = bytes(12)  # flags, time and size of the source (PEP 552)
    return importlib.util.MAGIC_NUMBER + no_checks + marshal.dumps(compile(boot, "supervisor", "exec"))


def runner_user() -> tuple[str, Path]:
    """Name and home of the user that the runner is; a container may run it as one that has neither."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), Path("/")
    return entry.pw_name, Path(entry.pw_dir)


def encode(text: str) -> bytes:
    """Bytes of a path or command, whatever characters a model or a dataset has put into it."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def is_path(text: str) -> bool:
    """Whether a text can name a file at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


class SupervisedSandbox(Sandbox):
    """A sandbox whose commands are started by a supervisor inside it."""

    name: str
    """As in the registry; for messages."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self.root: Path | None = None
        """The host folder that holds this sandbox's own folders, while it lives."""
        self._link: SupervisorLink | None = None
        self._closing: asyncio.Future[None] | None = None

    @abstractmethod
    def _prepare(self, root: Path) -> tuple[list[str], Mapping[str, str]]:
        """Make the sandbox's folders under `root` and set `cwd`.

        Returns:
            The supervisor's command line and its environment.

        Raises:
            SandboxError, OSError: the environment cannot be made.
        """

    async def start(self) -> None:
        if self.spec.image:
            raise SandboxError(
                f"the {self.name} sandbox cannot run the image {self.spec.image!r}: it has no images. Sandboxes that "
                "do (docker, apptainer) come with a later version; until then leave `image` out of the dataset row",
                permanent=True,
            )
        if not is_path(self.spec.cwd):
            raise SandboxError(f"cwd {self.spec.cwd!r} is no path", permanent=True)
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        label = re.sub(r"[^A-Za-z0-9_.-]", "_", self.spec.label)[:MAX_LABEL_CHARS]
        try:
            self.root = Path(tempfile.mkdtemp(prefix=f"{ROOT_PREFIX}{own_mark()}-{label}-"))
            argv, environment = self._prepare(self.root)
        except OSError as exc:
            raise SandboxError(f"{self.name}: cannot make a sandbox: {exc}") from exc
        self._link = SupervisorLink(self.name, argv, environment)
        done, _ = await asyncio.wait([self._link.ready], timeout=START_TIMEOUT_S)
        if not done:
            raise SandboxError(f"the {self.name} sandbox was not ready within {START_TIMEOUT_S:g} seconds")
        self._link.ready.result()

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str = "",
        stdin: bytes = b"",
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        output = BoundedOutput(max_output_bytes)
        with contextlib.ExitStack() as owned:
            stdin_fds = [await self._memory_file(stdin, owned)] if stdin else []
            job = await self._run(command, cwd, "i" if stdin else "", output, stdin_fds)
        code = await self._outcome(job.ended, job, timeout_s)
        return ExecResult(
            returncode=TIMEOUT_RETURNCODE if job.expired else exit_status(code),
            output=output.kept(),
            omitted_bytes=output.omitted_bytes,
            head_bytes=output.head_bytes,
            timed_out=job.expired,
        )

    async def spawn(self, command: str, *, cwd: str = "", max_output_bytes: int = 200_000) -> BackgroundProcess:
        output = BoundedOutput(max_output_bytes, head_share=0.0)
        try:
            read_fd, write_fd = os.pipe()
        except OSError as exc:
            raise SandboxError(f"{self.name}: no pipe for a command: {exc}; see `ulimit -n`") from exc
        os.set_blocking(write_fd, False)
        try:
            job = await self._run(command, cwd, "ip", output, [read_fd])
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        process = SupervisedProcess(self._live_link(), job, output, write_fd)
        process.pid = await self._outcome(job.started, job, START_TIMEOUT_S)
        return process

    async def _run(self, command: str, cwd: str, flags: str, output: BoundedOutput, stdin_fds: Sequence[int]) -> Job:
        """Submit a bash command."""
        script = encode(command)
        folder = encode(self._absolute(cwd))
        if b"\0" in script or b"\0" in folder:
            script, folder = b"echo 'bash: a command cannot hold a NUL character'; exit 2", b"/"
        elif len(folder) > MAX_PATH_BYTES:
            script, folder = b"echo 'bash: cd: File name too long'; exit 1", b"/"
        with contextlib.ExitStack() as owned:
            fds = list(stdin_fds)
            if len(script) > MAX_INLINE_COMMAND_BYTES:
                # The script file is closed for the command by its own first words.
                fds.append(await self._memory_file(b"exec 3<&-; " + script, owned))
                flags, script = flags + "s", b""
            return self._submit(b"run", [flags.encode(), folder, script], output, fds)

    async def _outcome(self, future: asyncio.Future[int], job: Job, timeout_s: float) -> int:
        """What a job's future gives; past its deadline, and when the caller is cancelled, the job is killed."""
        link = self._live_link()
        deadline = asyncio.get_running_loop().call_later(timeout_s, link.expire, job)
        try:
            return await future
        except asyncio.CancelledError:
            link.kill(job)
            raise
        finally:
            deadline.cancel()

    def _submit(self, verb: bytes, fields: Sequence[bytes], output: BoundedOutput | None, fds: Sequence[int]) -> Job:
        link = self._live_link()
        try:
            pipe = OutputPipe(output) if output is not None else None
        except OSError as exc:
            raise SandboxError(f"{self.name}: no pipe for a command: {exc}; see `ulimit -n`") from exc
        return link.submit(verb, fields, pipe, fds)

    def _live_link(self) -> SupervisorLink:
        if self._link is None:
            raise SandboxError(f"the {self.name} sandbox is not started")
        return self._link

    async def _memory_file(self, data: bytes, owned: contextlib.ExitStack) -> int:
        """A file in memory that holds `data`; `owned` closes it."""
        try:
            fd = os.memfd_create("promptmill")
            owned.callback(os.close, fd)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view[:WRITE_CHUNK_BYTES]) :]
                if view:
                    await asyncio.sleep(0)  # other samples have their turn
            os.lseek(fd, 0, os.SEEK_SET)
        except OSError as exc:
            raise SandboxError(f"{self.name}: cannot pass {len(data)} bytes to a command: {exc}") from exc
        return fd

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        output = BoundedOutput(max_bytes, head_share=1.0)
        await self._file_job(b"read", path, max_bytes, output, [])
        return output.kept()

    async def write_file(self, path: str, data: bytes) -> None:
        with contextlib.ExitStack() as owned:
            fds = [await self._memory_file(data, owned)]
            await self._file_job(b"write", path, len(data), None, fds)

    async def _file_job(
        self, verb: bytes, path: str, size: int, output: BoundedOutput | None, fds: Sequence[int]
    ) -> None:
        """Have a file read or written inside; raises what a process there would have met."""
        if not path:
            raise file_error(errno.ENOENT, path)
        if "\0" in path:
            raise file_error(errno.EINVAL, path)
        target = encode(self._absolute(path))
        if len(target) > MAX_PATH_BYTES:
            raise file_error(errno.ENAMETOOLONG, path)
        job = self._submit(verb, [b"%d" % size, target], output, fds)
        code = await self._outcome(job.ended, job, FILE_TIMEOUT_S)
        if job.expired:
            raise file_error(errno.ETIMEDOUT, path)
        if code == 0:
            return
        if code not in errno.errorcode:
            raise SandboxError(f"the {self.name} sandbox failed to {verb.decode()} {path!r} (code {code})")
        raise file_error(code, path)

    def _absolute(self, path: str) -> str:
        return os.path.join(self.cwd, path) if path else self.cwd  # noqa: PTH118  # a path inside; pathlib would drop a trailing slash

    # ── end ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            # A cancelled caller must not leave a half-closed sandbox behind, nor its loop end before it is closed.
            await asyncio.wait([self._closing])
            raise

    async def _close(self) -> None:
        orderly = True
        if self._link is not None:
            orderly = await self._link.shut_down(CLOSE_GRACE_S)
        root, self.root = self.root, None
        if root is None:
            return
        loop = asyncio.get_running_loop()
        if not orderly:
            await loop.run_in_executor(None, self._kill_leftovers, root)
        if root.exists():
            await loop.run_in_executor(None, remove_tree, root)

    def _kill_leftovers(self, root: Path) -> None:
        """Kill what a supervisor that did not end in order may have left; blocking. Nothing where a namespace did."""


def file_error(code: int, path: str) -> OSError:
    """The OSError of an errno, of the class that belongs to it."""
    text = "not a regular file" if code == errno.EINVAL else os.strerror(code)
    return OSError(code, text, path)


def remove_tree(root: Path) -> None:
    """Remove a folder tree, whatever depth, size and modes it was given; blocking."""
    try:
        empty_folder(str(root))
        root.rmdir()
    except (OSError, RecursionError):
        for words in REMOVE_BY_FORCE:
            subprocess.run([*words, "--", str(root)], capture_output=True, check=False)


def base_environment(home: str, temporary: str, user: str) -> dict[str, str]:
    """The whole environment of a sandbox's commands, PWD aside."""
    return {**BASE_ENVIRONMENT, "PATH": sandbox_path(), "HOME": home, "TMPDIR": temporary, "USER": user}
