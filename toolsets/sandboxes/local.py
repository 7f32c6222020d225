"""Plain processes of the runner's own user, in fresh folders: an environment of their own, but no protection.

What it does promise: the commands' environment holds none of the runner's keys, each sample has its own workspace, home
and temporary folder, and all its processes end with it, or with the runner, however that ends. What it cannot: keep a
command from reading or killing whatever the runner's user may read or kill.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from toolsets.sandboxes.base import Availability, SandboxError
from toolsets.sandboxes.supervised import (
    SupervisedSandbox,
    base_environment,
    runner_user,
    sandbox_path,
    supervisor_argv,
    supervisor_bytecode,
)

NOT_PROTECTED = (
    "commands run as plain processes of this user: its files, its other processes (the runner and other samples "
    "included), the network and this machine are NOT protected from them; --sandbox=bubblewrap isolates them"
)

KILL_ROUNDS, KILL_ROUND_S = 200, 0.01


class LocalSandbox(SupervisedSandbox):
    """Processes on this machine, told apart from the runner's by their folders and environment only."""

    name = "local"
    isolates = False

    @classmethod
    def availability(cls) -> Availability:
        if not sys.platform.startswith("linux"):
            return Availability(works=False, detail=f"the local sandbox needs Linux; this is {sys.platform}")
        if shutil.which("bash", path=sandbox_path()) is None:
            return Availability(works=False, detail=f"the local sandbox needs bash, found nowhere on {sandbox_path()}")
        return Availability(works=True, detail=NOT_PROTECTED)

    def _prepare(self, root: Path) -> tuple[list[str], Mapping[str, str]]:
        workspace, home, temporary = (root / name for name in ("workspace", "home", "tmp"))
        for folder in (workspace, home, temporary):
            folder.mkdir(mode=0o700)
        self.cwd = str(self._working_folder(workspace))
        environment = base_environment(str(home), str(temporary), runner_user()[0])
        supervisor = root / "supervisor.pyc"
        supervisor.write_bytes(supervisor_bytecode())
        return supervisor_argv(str(supervisor), str(root)), environment

    def _working_folder(self, workspace: Path) -> Path:
        """The host folder that the sample names; a relative one is made in the workspace."""
        if not self.spec.cwd:
            return workspace
        folder = Path(os.path.normpath(workspace / self.spec.cwd))
        if not Path(self.spec.cwd).is_absolute():
            if not folder.is_relative_to(workspace):
                raise SandboxError(f"cwd {self.spec.cwd!r} leads out of the workspace", permanent=True)
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise SandboxError(
                f"cwd {self.spec.cwd!r} is no folder on this machine, and the local sandbox cannot make it up; make "
                "it, or use a sandbox that isolates (bubblewrap)",
                permanent=True,
            )
        return folder

    def _kill_leftovers(self, root: Path) -> None:
        """Kill what a supervisor that was itself killed left behind: known by the HOME that only this sandbox has."""
        marker = b"\0HOME=" + os.fsencode(root / "home") + b"\0"
        for _ in range(KILL_ROUNDS):
            found = [pid for pid in own_processes() if marker in b"\0" + environment_of(pid)]
            if not found:
                return
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(KILL_ROUND_S)


def own_processes() -> list[int]:
    """Every process id of this machine but our own."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != str(os.getpid())]


def environment_of(pid: int) -> bytes:
    """The environment that a process was started with; empty for one that has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
