"""The one process that a sandbox keeps: it starts commands and file work inside, and ends them all with itself.

Run as `python -I -S -B supervisor.pyc [FOLDER...]`, a file that holds it and `inside_files` compiled, with one end of a
SOCK_SEQPACKET pair as its standard input and error, and `/dev/null` as its output. It imports nothing else of this
project, and little of Python, because each sample starts one: most of its cost is the interpreter's own start.

Requests, from the host; fields are separated by NUL, file descriptors travel beside them
    run   ID FLAGS CWD COMMAND   + output, [standard input], [script]    FLAGS: of `i` (input), `s` (script), `p` (pid)
    read  ID MAX_BYTES PATH      + output
    write ID SIZE PATH           + file that holds the data
    kill  ID                     the whole session of that job
    drain                        + pipe, read and dropped until its last writer is gone
Replies
    ready                        once, before anything else
    started ID PID               for a `run` that asked for it
    ended ID CODE                an exit status, or the negated number of a signal; of read and write: an errno
    any other text               what this process (or bubblewrap before it) had to say as it died

Invariants
    Every job is a session of its own, with exactly the descriptors that its request named.
    Whoever loses its parent becomes a child of this process: as PID 1 of a namespace, or as a child subreaper.
    At the end of its input (the host closed it, or died) it kills all of them, removes the FOLDERs, and exits.
"""

import _signal as signal  # type: ignore[import-not-found]  # `signal` itself costs 4 ms more, for its enums
import _socket
import os
import select
import sys

from toolsets.sandboxes.inside_files import read_file, remove_folders, write_file

CONTROL, NULL = 0, 1
MAX_REQUEST_BYTES = 65_536
MAX_FDS = 3
MAX_DRAINED = 128
CHUNK_BYTES = 65_536
KILL_CHECK_MS = 20
CLOSE_ROUNDS, CLOSE_ROUND_S = 2_500, 0.002
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NO_FOLDER, CANNOT_START, UNKNOWN_FAULT = 1, 126, 255
OOM_SCORE = b"500"
"""Should memory run out, the kernel takes a command before it takes the runner."""
SCRIPT_PATH = b". /proc/self/fd/3"
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Only the host ends this process: `pkill python` is a thing that agents do."""
RESET_SIGNALS = (*IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGCONT)
"""Those that a job gets back: set by us, by Python, or by whoever started the runner."""


class Job:
    """A running command or file operation."""

    __slots__ = ("code", "doomed", "id", "pid")

    def __init__(self, job_id: int, pid: int) -> None:
        self.id = job_id
        self.pid = pid
        self.code: int | None = None
        self.doomed = False
        """Whether it was killed; then its end is told only when its whole session is gone."""


class Supervisor:
    """The loop between the host's requests and the processes inside."""

    def __init__(self, bash: str) -> None:
        self.bash = bash
        self.environment = dict(os.environb)
        self.parent = os.getppid()
        self.control = _socket.socket(fileno=CONTROL)
        self.job_by_pid: dict[int, Job] = {}
        self.drained: dict[int, None] = {}  # an ordered set
        self.poll = select.poll()
        self.wakeup, wakeup_end = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(wakeup_end, False)
        for signal_number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(signal_number, lambda *_: None)
        for signal_number in IGNORED_SIGNALS:
            signal.signal(signal_number, signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for fd in (CONTROL, self.wakeup):
            self.poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Answer requests until the host is gone."""
        self.control.send(b"ready")
        while True:
            doomed = any(job.doomed for job in self.job_by_pid.values())
            ready = {fd for fd, _ in self.poll.poll(KILL_CHECK_MS if doomed else None)}
            # SIGCONT comes from the kernel when the thread that started us ends, even while we are stopped.
            if self.wakeup in ready and signal.SIGCONT in os.read(self.wakeup, 512) and os.getppid() != self.parent:
                return
            self.reap()
            if CONTROL in ready and not self.take_request():
                return
            for fd in ready & self.drained.keys():
                self.drain(fd)

    def reap(self) -> None:
        """Collect whoever ended, and tell the ends that the host waits for."""
        for pid, status in ended_children():
            job = self.job_by_pid.get(pid)
            if job is not None:
                job.code = os.waitstatus_to_exitcode(status)
        for job in list(self.job_by_pid.values()):
            if job.doomed and (kill_session(job.pid) or job.code is None):
                continue
            if job.code is not None:
                del self.job_by_pid[job.pid]
                self.tell(b"ended %d %d" % (job.id, job.code))

    def tell(self, reply: bytes) -> None:
        """Send a reply. When the host is gone it is lost, and the end of our input stops the loop."""
        try:
            self.control.send(reply)
        except OSError:
            return

    def take_request(self) -> bool:
        """Carry out one request; returns whether there was one."""
        try:
            packet, ancillary, _, _ = self.control.recvmsg(
                MAX_REQUEST_BYTES, _socket.CMSG_SPACE(4 * MAX_FDS), _socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return False
        fds = [
            int.from_bytes(data[start : start + 4], sys.byteorder)
            for _, _, data in ancillary
            for start in range(0, len(data), 4)
        ]
        if not packet:
            return False
        verb, *fields = packet.split(b"\0", 4)
        if verb == b"drain":
            self.poll.register(fds[0], select.POLLIN)
            self.drained[fds[0]] = None
            if len(self.drained) > MAX_DRAINED:
                self.stop_draining(next(iter(self.drained)))
        elif verb == b"kill":
            self.kill(int(fields[0]))
        else:
            self.begin(verb, fields, fds)
            for fd in fds:
                os.close(fd)
        return True

    def begin(self, verb: bytes, fields: list[bytes], fds: list[int]) -> None:
        """Start the job that a request describes, or tell at once how it failed."""
        job_id = int(fields[0])
        try:
            if verb == b"run":
                pid = self.start_bash(fields[1], fields[2], fields[3], fds)
            else:
                pid = start_file_job(verb, fields[2], int(fields[1]), fds[0])
        except OSError as exc:
            code = exc.errno or UNKNOWN_FAULT
            if verb == b"run":
                os.write(fds[0], f"bash: {os.strerror(code)}\n".encode())
                code = CANNOT_START
            self.tell(b"ended %d %d" % (job_id, code))
            return
        if pid == 0:
            self.tell(b"ended %d %d" % (job_id, NO_FOLDER))
            return
        self.job_by_pid[pid] = Job(job_id, pid)
        if verb == b"run" and b"p" in fields[1]:
            self.tell(b"started %d %d" % (job_id, pid))

    def start_bash(self, flags: bytes, cwd: bytes, command: bytes, fds: list[int]) -> int:
        """Start a command; returns its process id, or 0 when its folder cannot be entered, which its output says."""
        output, stdin = fds[0], fds[1] if b"i" in flags else NULL
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        if b"s" in flags:
            actions.append((os.POSIX_SPAWN_DUP2, fds[-1], 3))
            command = SCRIPT_PATH
        try:
            # A spawned process starts where we are. Forking, to go there in the child, takes a third longer.
            os.chdir(cwd)
        except OSError as exc:
            os.write(output, b"bash: cd: " + cwd + f": {exc.strerror}\n".encode())
            return 0
        try:
            return os.posix_spawn(
                self.bash,
                [b"bash", b"-c", command],
                {**self.environment, b"PWD": cwd},
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=RESET_SIGNALS,
            )
        finally:
            os.chdir("/")

    def kill(self, job_id: int) -> None:
        """Kill a job and its whole session; its end is told when all of it is gone."""
        for job in self.job_by_pid.values():
            if job.id == job_id:
                job.doomed = True
                kill_session(job.pid)

    def drain(self, fd: int) -> None:
        """Drop what a left-behind process prints, so that it neither blocks nor dies of a broken pipe."""
        try:
            ended = not os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if ended:
            self.stop_draining(fd)

    def stop_draining(self, fd: int) -> None:
        """Close a drained pipe."""
        del self.drained[fd]
        self.poll.unregister(fd)
        os.close(fd)


def start_file_job(verb: bytes, path: bytes, size: int, fd: int) -> int:
    """Fork a child that reads a file into `fd`, or writes one from it; its exit status is an errno."""
    pid = os.fork()
    if pid:
        return pid
    code = UNKNOWN_FAULT
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signal_number in RESET_SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)
        os.dup2(fd if verb == b"write" else NULL, 0)
        os.dup2(NULL, 2)
        if verb == b"read":
            os.dup2(fd, 1)
        code = read_file(path, size) if verb == b"read" else write_file(path, size)
    except OSError as exc:
        code = exc.errno or UNKNOWN_FAULT
    finally:
        os._exit(code)


def ended_children() -> "list[tuple[int, int]]":
    """Reap every child that has ended: pairs of process id and wait status."""
    ended = []
    try:
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(pair)
    except ChildProcessError:
        return ended
    return ended


def process_table() -> "list[tuple[int, int, int]]":
    """Every live process as (process id, parent, session); zombies are left out."""
    table = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib would double the time that the imports take
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
        except OSError:
            continue
        try:
            # The command's name, in parentheses, may itself hold spaces and parentheses.
            state, parent, _, session, *_ = os.read(fd, 1024).rpartition(b")")[2].split(None, 4)
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
        if state not in b"ZX":
            table.append((int(name), int(parent), int(session)))
    return table


def kill_session(leader: int) -> bool:
    """Kill everything in a session; returns whether anything of it was still alive.

    The process group alone would miss what `timeout` or a job-control shell has put into a group of its own.
    """
    members = [pid for pid, _, session in process_table() if session == leader or pid == leader]
    for pid in members:
        kill_quietly(pid)
    return bool(members)


def kill_quietly(pid: int) -> None:
    """SIGKILL; a process that is gone already, or that a set-uid program made another's, is left."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_everything() -> None:
    """Kill all descendants until none is left; gives up on those that the kernel will not let go."""
    for _ in range(CLOSE_ROUNDS):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if os.getpid() == 1:
            kill_quietly(-1)
        else:
            children: dict[int, list[int]] = {}
            for pid, parent, _ in process_table():
                children.setdefault(parent, []).append(pid)
            family = children.get(os.getpid(), [])
            for pid in family:
                family.extend(children.get(pid, ()))
                kill_quietly(pid)
        select.select([], [], [], CLOSE_ROUND_S)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, and hear (by SIGCONT, even when stopped) of the host's end."""
    import ctypes  # only where there is no namespace that does this: it costs 2 ms

    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def find_bash() -> str:
    """The bash of the sandbox's own PATH."""
    for folder in os.environ["PATH"].split(":"):
        if os.access(f"{folder}/bash", os.X_OK):
            return f"{folder}/bash"
    return sys.exit("no bash on " + os.environ["PATH"])


def main() -> None:
    """Serve the host, then leave nothing behind."""
    os.umask(0o022)
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(score, OOM_SCORE)
    os.close(score)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if os.getpid() != 1:
        adopt_orphans()
    supervisor = Supervisor(find_bash())
    try:
        supervisor.serve()
    finally:
        kill_everything()
        remove_folders(sys.argv[1:])
    # The interpreter's own tidying would take longer than all of the above.
    os._exit(0)


if __name__ == "__main__":
    main()
