"""The contract of a sandbox: one environment, for one sample, made fresh and removed at the end.

Every backend promises
    * its own workspace, home and temporary folder, which no other sample, worker or run can see;
    * a clean environment (an allow-list; never the runner's keys);
    * that every process started in it, however it detached itself, is dead once `close` has returned.

Paths are paths *inside* the sandbox. Relative ones are taken from `cwd`. File access goes through the sandbox's own
eyes, so that a symbolic link made inside never leads to a file outside that a command inside could not read.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

BASE_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
"""What every backend's environment starts from, beside PATH, HOME, TMPDIR, USER and PWD; nothing is inherited."""


class SandboxError(Exception):
    """The sandbox cannot be made or no longer answers; the sample that owns it cannot go on."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        """Whether trying again on the same machine is pointless (a missing image, a folder that does not exist)."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What one sample asks of its sandbox."""

    label: str
    """Names the run and the sample, for people who look at processes and folders. Letters, digits, `-`, `_`, `.`."""
    image: str = ""
    """Container image; empty when the sample names none. A backend without images refuses it as permanent."""
    cwd: str = ""
    """Working folder; empty means the sandbox's own workspace, and a relative one is made in there."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did inside a sandbox."""

    returncode: int
    """Exit status; a command ended by signal N has 128 + N, one past its deadline 124."""
    output: bytes
    """Standard output and standard error as they came, head and tail kept, at most `max_output_bytes` in all."""
    omitted_bytes: int = 0
    """How many bytes between head and tail were dropped while the command ran."""
    head_bytes: int = 0
    """Where in `output` the dropped middle was; meaningful only when `omitted_bytes` is not 0."""
    timed_out: bool = False


class BackgroundProcess(ABC):
    """A process that goes on while the agent does other things; ended with its sandbox at the latest."""

    pid: int
    """Process id as seen inside the sandbox."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit status as in `ExecResult`, or None while it runs."""

    @abstractmethod
    def output(self) -> tuple[bytes, int]:
        """What it printed so far: the last `max_output_bytes` of it, and how many bytes came before those."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send to its standard input. Raises BrokenPipeError when that is closed."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """Close its standard input; the process sees end of file."""

    @abstractmethod
    async def kill(self) -> None:
        """End it and everything in its process group, and wait until it is gone. No-op when it has ended."""

    @abstractmethod
    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most `timeout_s` seconds; returns whether it has ended."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works on this machine, and the sentence that says why not or what is not protected."""

    works: bool
    detail: str = ""


class Sandbox(ABC):
    """One environment for one sample. Not safe for use by two tasks at the same time, `close` excepted."""

    isolates: ClassVar[bool]
    """Whether commands are kept from the runner's files, processes and network."""
    cwd: str
    """Where commands start unless told otherwise; known after `start`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Whether this backend can work here; blocking, may start a process, called once per run."""

    @abstractmethod
    async def start(self) -> None:
        """Make the environment. Raises SandboxError, and then nothing is left behind."""

    @abstractmethod
    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str = "",
        stdin: bytes = b"",
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        """Run a bash command to its end.

        Past `timeout_s` seconds, or when the awaiting task is cancelled, its whole process group is killed. A process
        that it left in the background goes on and does not delay the result. Standard input holds `stdin`, then ends.

        Raises:
            SandboxError: the sandbox no longer answers. A failing command, a missing `cwd` included, is a result.
        """

    @abstractmethod
    async def spawn(self, command: str, *, cwd: str = "", max_output_bytes: int = 200_000) -> BackgroundProcess:
        """Start a bash command in the background, its standard input an open pipe. Raises SandboxError."""

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Read at most `max_bytes` of a regular file.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError, OSError: as a process inside would see it.
            SandboxError: the sandbox no longer answers.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Replace a file whole (written beside, then renamed), making parent folders; raises as `read_file`."""

    @abstractmethod
    async def close(self) -> None:
        """Kill every process and remove every folder of the sandbox. Safe to call twice and after a failed start.

        Cancelling the caller does not stop it: it is closed when the CancelledError comes.
        """
