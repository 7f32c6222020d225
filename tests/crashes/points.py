"""Where a process kills itself: every call by which a run folder is written, seen below Python's buffers.

What is seen, of files within the run folder: `os.open` that creates, `os.write`, `os.ftruncate`, `os.fsync`,
`os.mkdir`, `os.rename`, `os.replace`, `os.unlink`; and of files that `open` opens for writing, what their buffers hand
down to the operating system, and `truncate`. Not seen: what writes nothing (locks, reads), and closing.

Ways to end at a call
    before, after   killed
    half            of a write, half of its bytes are written, then killed
    unended         of a write, all bytes but the last, which ends a line
    power           after the call the power fails: what no fsync has forced to disk is gone, names included
    cancel          after the call, the run is cancelled
"""

import builtins
import io
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in ("open", "write", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink")
}
WRITING = frozenset("wax+")
"""What the mode has of a file that is opened for writing."""


@dataclass(slots=True)
class Points:
    """The calls of this process that write below a folder, numbered from 1, and where to end."""

    root: Path
    stop_at: int
    """The number of the call to end at, among those that `among` names."""
    among: str
    """Name and file of a kind of call; empty for all calls."""
    how: str
    tell: Callable[[str], None]
    """Takes a line for each call: name and file."""
    cancel: Callable[[], object]
    matching: int = 0
    """How many calls there were so far, of those that `among` names."""
    disk: "DurableDisk" = field(init=False)

    def __post_init__(self) -> None:
        self.disk = DurableDisk(self.root)

    def call(self, name: str, path: Path, perform: Callable[[], Any]) -> Any:
        """Do what is to be done, unless this is where to end."""
        is_stop = self._is_stop(name, path)
        if is_stop and self.how == "before":
            die()
        if name in ("replace", "rename"):
            self.disk.keep(path)
        result = perform()
        if name == "fsync":
            self.disk.synced(path)
        if is_stop:
            self._end()
        return result

    def write(self, path: Path, perform: Callable[[Any], int], data: Any) -> int:
        """`call` for a write, which may be cut short."""
        is_stop = self._is_stop("write", path)
        view = memoryview(data).cast("B")
        if is_stop:
            kept = {"before": 0, "half": len(view) // 2, "unended": len(view) - 1}.get(self.how, len(view))
            if kept < len(view):
                while kept:
                    written = perform(view[:kept])
                    view, kept = view[written:], kept - written
                die()
        result = perform(data)
        if is_stop:
            self._end()
        return result

    def _is_stop(self, name: str, path: Path) -> bool:
        call = f"{name} {path.relative_to(self.root)}"
        self.tell(call)
        if self.among not in ("", call):
            return False
        self.matching += 1
        return self.matching == self.stop_at

    def _end(self) -> None:
        """End after a call."""
        if self.how == "cancel":
            self.cancel()
            return
        if self.how == "power":
            self.disk.power_fails()
        die()

    def within(self, path: Any) -> Path | None:
        """The full path of the run folder or of something in it; None for any other."""
        if not isinstance(path, str | os.PathLike):
            return None
        full = Path(path).absolute()
        return full if full.is_relative_to(self.root) else None


def die() -> NoReturn:
    """Be killed, as by the kernel for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


class DurableDisk:
    """What of a folder would survive a power cut. What is there at the start would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spare = root.with_name(f"{root.name}.replaced")
        """Folder for files whose replacement is not yet forced to disk."""
        files = list(root.iterdir()) if root.is_dir() else []
        self.sizes = {path.stat().st_ino: path.stat().st_size for path in files}
        """Inode -> bytes forced to disk."""
        self.names = {path.name for path in files}

    def keep(self, target: Path) -> None:
        """Keep a file that is about to be replaced."""
        if target.is_file():
            self.spare.mkdir(exist_ok=True)
            if not (self.spare / target.name).exists():
                (self.spare / target.name).hardlink_to(target)

    def synced(self, path: Path) -> None:
        """A file, or the folder, was forced to disk."""
        if path == self.root:
            self.names = {path.name for path in path.iterdir()}
            shutil.rmtree(self.spare, ignore_errors=True)
        elif path.exists():
            found = path.stat()
            self.sizes[found.st_ino] = found.st_size

    def power_fails(self) -> None:
        """Leave of the folder what a power cut would, at the worst."""
        for kept in list(self.spare.iterdir()) if self.spare.is_dir() else ():
            REAL["replace"](kept, self.root / kept.name)
        for path in list(self.root.iterdir()) if self.root.is_dir() else ():
            if not path.is_file():
                continue
            if path.name not in self.names:
                REAL["unlink"](path)
                continue
            size = self.sizes.get(path.stat().st_ino, 0)
            if path.stat().st_size > size:
                os.truncate(path, size)


def watch(points: Points) -> None:
    """From now on, see this process's calls. For a process that ends with the run: nothing is put back."""
    seen = _Seen(points)
    changed: Any = os
    changed.open, changed.write, changed.mkdir, changed.unlink = seen.open, seen.write, seen.mkdir, seen.unlink
    changed.fsync, changed.ftruncate = seen.by_descriptor("fsync"), seen.by_descriptor("ftruncate")
    changed.rename, changed.replace = seen.by_target("rename"), seen.by_target("replace")
    _SeenFile.points = points
    opened: Any = seen.open_file
    builtins.open = io.open = opened


class _Seen:
    """What stands in place of the calls of `os`, and of `open`."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.real_open = builtins.open

    def open(self, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        full = self.points.within(path) if flags & os.O_CREAT else None
        if full is None or full.exists():
            return int(REAL["open"](path, flags, mode, **rest))
        return int(self.points.call("create", full, lambda: REAL["open"](path, flags, mode, **rest)))

    def write(self, descriptor: int, data: Any) -> int:
        full = self._path_of(descriptor)
        if full is None:
            return int(REAL["write"](descriptor, data))
        return self.points.write(full, lambda part: int(REAL["write"](descriptor, part)), data)

    def _path_of(self, descriptor: int) -> Path | None:
        return self.points.within(Path(f"/proc/self/fd/{descriptor}").readlink())

    def by_descriptor(self, name: str) -> Callable[..., Any]:
        def seen(descriptor: int, *rest: Any) -> Any:
            full = self._path_of(descriptor)
            if full is None:
                return REAL[name](descriptor, *rest)
            return self.points.call(name, full, lambda: REAL[name](descriptor, *rest))

        return seen

    def by_target(self, name: str) -> Callable[..., Any]:
        def seen(source: Any, target: Any, **rest: Any) -> Any:
            full = self.points.within(target)
            if full is None:
                return REAL[name](source, target, **rest)
            return self.points.call(name, full, lambda: REAL[name](source, target, **rest))

        return seen

    def unlink(self, path: Any, **rest: Any) -> Any:
        full = self.points.within(path)
        if full is None or not full.exists():
            return REAL["unlink"](path, **rest)
        return self.points.call("unlink", full, lambda: REAL["unlink"](path, **rest))

    def mkdir(self, path: Any, *rest: Any, **named: Any) -> Any:
        full = self.points.within(path)
        if full is None or full.is_dir():
            return REAL["mkdir"](path, *rest, **named)
        return self.points.call("mkdir", full, lambda: REAL["mkdir"](path, *rest, **named))

    def open_file(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        if "b" not in mode or not WRITING & set(mode) or self.points.within(file) is None:
            return self.real_open(file, mode, buffering, *rest, **named)
        opener = named.get("opener") or (lambda path, flags: self.open(path, flags, 0o666))
        raw = _SeenFile(file, mode.replace("b", ""), opener=opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE
        return io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)


class _SeenFile(io.FileIO):
    """A file below its buffer."""

    points: Points

    def write(self, data: Any) -> int:
        return self.points.write(Path(str(self.name)).absolute(), super().write, data)

    def truncate(self, size: int | None = None) -> int:
        def perform() -> int:
            return super(_SeenFile, self).truncate(size)

        return int(self.points.call("truncate", Path(str(self.name)).absolute(), perform))
