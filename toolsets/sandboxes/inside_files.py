"""What the supervisor does with files, inside the sandbox: read one, replace one, remove what is left.

Reading and writing are done by a forked child whose exit status is the errno, so a file that never answers (a FIFO, one
of a server that is gone) holds up nobody. It has standard input or output as its end of the transfer.
"""
# ruff: noqa: PTH103, PTH104, PTH106, PTH108, PTH116, PTH118, PTH120
# pathlib would double the time that the supervisor's imports take.

import os
import stat
from errno import EACCES, EINVAL, EISDIR, ENOTDIR, EPERM, EROFS, EXDEV

CHUNK_BYTES = 65_536
REMOVE_BY_FORCE = (("chmod", "-R", "u+rwX"), ("rm", "-rf", "--one-file-system"))
"""For trees that are too deep for us, or whose folders were made unreadable."""


def remove_folders(folders: "list[str]") -> None:
    """Remove folder trees, whatever depth, size and modes they were given; of a mount point, what is in it."""
    for folder in folders:
        try:
            empty_folder(folder)
        except (OSError, RecursionError):
            for words in REMOVE_BY_FORCE:
                run_program(*words, "--", folder)
            continue
        try:
            os.rmdir(folder)
        except OSError:
            continue


def empty_folder(folder: str) -> None:
    """Remove what is in a folder. What root has mounted into it is not entered: it may be part of the machine."""
    device = os.stat(folder).st_dev
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.stat(follow_symlinks=False).st_dev != device:
                    raise OSError(EXDEV, "")
                empty_folder(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def run_program(*words: str) -> None:
    """Run a program of the system to its end; what it has to say is dropped."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(1, 2)  # /dev/null
            os.execvp(words[0], words)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)


def regular_file(path: bytes) -> os.stat_result:
    """The status of what a path leads to; anything but a regular file is refused."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(EISDIR, "")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(EINVAL, "")
    return status


def read_file(path: bytes, max_bytes: int) -> int:
    """Copy the start of a regular file to standard output."""
    regular_file(path)
    # Should the path become a FIFO in this instant, O_NONBLOCK keeps the open from waiting for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return EINVAL
    copy(fd, 1, max_bytes)
    return 0


def write_file(path: bytes, size: int) -> int:
    """Replace a file by what standard input holds: written beside it, then renamed."""
    try:
        status: os.stat_result | None = regular_file(path)
    except FileNotFoundError:
        status = None
    if path.endswith(b"/"):
        raise IsADirectoryError(EISDIR, "")
    if status is not None and not os.access(path, os.W_OK):
        return EACCES
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    make_folders(folder)
    beside = os.path.join(folder, b".promptmill-%d" % os.getpid())
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except OSError as exc:
        if status is None or exc.errno not in (EACCES, EPERM, EROFS, EXDEV):
            raise
        # The file may be written though nothing may be made beside it.
        copy(0, os.open(target, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK), size)
        return 0
    try:
        if status is not None:
            keep_owner_and_mode(fd, status)
        copy(0, fd, size)
        os.rename(beside, target)
    except OSError:
        os.unlink(beside)
        raise
    return 0


def keep_owner_and_mode(fd: int, status: os.stat_result) -> None:
    """Give a new file what the one it replaces had; the owner where that is allowed."""
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.fchown(fd, status.st_uid, status.st_gid)
        except OSError:
            os.fchmod(fd, status.st_mode & 0o777)  # a set-uid bit would now be ours
            return
    os.fchmod(fd, stat.S_IMODE(status.st_mode))


def make_folders(folder: bytes) -> None:
    """Make a folder and its parents; a file in the way is told as a process would see it."""
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as exc:
        raise NotADirectoryError(ENOTDIR, "") from exc


def copy(source: int, target: int, size: int) -> None:
    """Copy at most `size` bytes in chunks."""
    while size > 0 and (chunk := os.read(source, min(size, CHUNK_BYTES))):
        size -= len(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
