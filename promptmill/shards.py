"""JSON-lines files: append with fsync, read past a torn end, replace whole.

Invariants
    A row is on disk before its sample counts as done.
    A torn last line (killed mid-write) is skipped by readers, and cut off before anything is appended after it.
"""

import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from promptmill.errors import THEN_AGAIN, StorageError

WRITE_CHUNK_BYTES = 1 << 20


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield each whole line, without its newline; see `read_lines_from`."""
    return (content for content, _ in read_lines_from(path, 0))


def read_lines_from(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield each whole line, without its newline, and where it ends; blank lines are left out.

    A missing file has no lines. A last line without newline is whole when it parses as JSON (other programs may write
    it so), else torn.

    Args:
        start: Where to begin, in bytes: the end of a line that was read before.

    Raises:
        StorageError: the file cannot be read.
    """
    end = start
    try:
        with path.open("rb", buffering=WRITE_CHUNK_BYTES) as file:
            if start:
                file.seek(start)
            for line in file:
                end += len(line)
                content = line.rstrip(b"\r\n")
                if end == len(line):
                    content = content.removeprefix(BOM_UTF8)
                if content and not content.isspace() and (line.endswith(b"\n") or is_json(content)):
                    yield content, end
    except FileNotFoundError:
        return
    except OSError as exc:
        raise StorageError(f"{path}: cannot read ({exc.strerror})") from exc


def is_json(content: bytes) -> bool:
    """Whether a line parses whole."""
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def append_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines and force them to disk, after repairing a torn end; the file is created when absent.

    Raises:
        StorageError: the disk refused; the file then ends at an earlier line.
    """
    try:
        with open(path, "ab", buffering=0, opener=_opened_itself) as file:
            start = file.tell()
            if start:
                start = repair_tail(path)
                file.seek(0, os.SEEK_END)
            try:
                _write_all(file.fileno(), b"".join(line + b"\n" for line in lines))
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # the first refusal is the one to tell
                    os.ftruncate(file.fileno(), start)
                raise
        if not start:
            sync_folder(path.parent)
    except OSError as exc:
        raise StorageError(f"{path}: cannot write ({exc.strerror}); make room or access, {THEN_AGAIN}") from exc


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _opened_itself(path: str, flags: int) -> int:
    """Open a file to write to, but nothing that a link planted in its place leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def repair_tail(path: Path) -> int:
    """Make a file end with a whole line: a torn last line is cut off. Returns the size, in bytes."""
    with open(path, "r+b", opener=_opened_itself) as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return 0
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return size
        start = _last_line_start(file.fileno(), size)
        file.seek(start)
        if is_json(file.read()):
            file.write(b"\n")
            return size + 1
        file.truncate(start)
        return start


def has_torn_end(path: Path) -> bool:
    """Whether a file's last line is torn: its write was cut off, or is still going on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(_last_line_start(file.fileno(), size))
        content = file.read()
    return bool(content.strip()) and not is_json(content)


def _last_line_start(descriptor: int, size: int) -> int:
    """Offset just after the last newline, searched backwards; 0 when there is none."""
    end = size
    while end > 0:
        start = max(0, end - WRITE_CHUNK_BYTES)
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def write_atomic(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace a file whole: written beside, forced to disk, renamed, the folder synced.

    Raises:
        StorageError: the disk refused; the old file is then untouched.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("xb", buffering=WRITE_CHUNK_BYTES) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as exc:
        raise StorageError(f"{path}: cannot write ({exc.strerror}); make room or access, {THEN_AGAIN}") from exc
    finally:
        with suppress(OSError):  # else it would hide what went wrong before
            beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, so that a new or renamed file survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
