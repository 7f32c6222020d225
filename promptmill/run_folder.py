"""The run folder: every path of a run, its lock, and the one writer.

Rows are appended by one thread, which takes all rows that wait, writes them to their files, forces those to disk
together, and only then reports them: under load one fsync serves many rows, and without load a row waits for its own
fsync alone. Nothing is ever reported before it is on disk.
"""

import asyncio
import os
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import filelock
import orjson

from promptmill.errors import OUTCOME_POLICY, ConfigError, Destination, StorageError
from promptmill.records import SampleResult
from promptmill.secrets import NO_SECRETS, Mask
from promptmill.shards import append_lines, sync_folder, write_atomic

T = TypeVar("T")

MOST_BATCHES = 10**18
_SHARD_NAME = re.compile(r"batch_(\d+)\.jsonl")


class RunFolder:
    """`data/<run_name>/`. Use `open` before writing, `close` at the end."""

    def __init__(self, path: Path, mask: Mask = NO_SECRETS) -> None:
        self.path = path
        self._mask = mask
        self.trajectories = path / "trajectories.jsonl"
        self.checkpoint = path / "checkpoint.json"
        self.statistics = path / "statistics.json"
        self.discarded = path / "discarded.jsonl"
        self.failed = path / "failed.jsonl"
        self.run_json = path / "run.json"
        self.log = path / "run.log"
        self.exports = path / "exports"
        self._owner_file = path / ".lock_owner"
        self.left_by = ""
        """Who held the lock last and went without unlocking it, after `open`; empty when nobody did."""
        self._lock = filelock.FileLock(path / ".lock")
        self._writer: ThreadPoolExecutor | None = None
        self._waiting: list[tuple[Path, bytes, asyncio.Future[None]]] = []
        self._in_hand: list[tuple[Path, bytes, asyncio.Future[None]]] = []
        self._draining: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Make and lock the folder.

        Raises:
            ConfigError: another process is writing this run, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout as exc:
            raise ConfigError(
                f"{self.path} is in use by {self._owner()}; wait for it, or take another --run_name for a new run"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"{self.path}: cannot make the run folder ({exc.strerror})") from exc
        self.left_by = self._owner() if self._owner_file.is_file() else ""
        started_at = datetime.now().isoformat(sep=" ", timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started_at": started_at}
        try:
            write_atomic(self._owner_file, [orjson.dumps(owner)])
        except StorageError as exc:
            self._lock.release()
            raise ConfigError(f"{self.path}: cannot write to the run folder ({exc})") from exc
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="run-folder")

    def move_aside(self) -> Path:
        """Rename the folder, with all that is in it, so that a new run can take its place; returns the new path.

        Raises:
            ConfigError: another process is writing this run, or the folder cannot be renamed.
        """
        self.open()
        aside = self.path.with_name(f"{self.path.name}.before_{datetime.now():%Y%m%d_%H%M%S_%f}")
        try:
            self.path.rename(aside)
            sync_folder(aside.parent)
        except OSError as exc:
            raise ConfigError(f"{self.path}: cannot move it aside to {aside.name} ({exc.strerror})") from exc
        finally:
            self.close()
        (aside / self._owner_file.name).unlink(missing_ok=True)
        return aside

    def _owner(self) -> str:
        try:
            owner = orjson.loads(self._owner_file.read_bytes())
            return f"process {owner['pid']} on {owner['host']}, started at {owner['started_at']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def close(self) -> None:
        """Wait for writes that have begun, and unlock. Safe to call twice."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
            self._writer = None
            with suppress(OSError):  # a folder that takes no writes any more: what ended the run is told
                self._owner_file.unlink(missing_ok=True)
        self._lock.release()

    def shard(self, number: int) -> Path:
        """The shard of a batch."""
        return self.path / f"batch_{number}.jsonl"

    def _numbered(self) -> list[tuple[int, Path]]:
        """What is named as a shard, batch 2 before batch 10."""
        names = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((int(match[1]), path) for path in names if (match := _SHARD_NAME.fullmatch(path.name)))

    def batch_numbers(self) -> list[int]:
        """The numbers that are taken, whatever has the name; one that no row could hold is not gone on from."""
        return [number for number, _ in self._numbered() if number < MOST_BATCHES]

    def shards(self) -> list[Path]:
        """All shards, batch 2 before batch 10. What is no file (a pipe, a dead link) is none."""
        return [path for _, path in self._numbered() if path.is_file()]

    def row_files(self) -> Sequence[Path]:
        """Every file that holds rows: what a scan reads."""
        return [*self.shards(), *(path for path in (self.discarded, self.failed) if path.is_file())]

    def row_bytes(self) -> int:
        """What a scan reads."""
        return sum(path.stat().st_size for path in self.row_files())

    def has_run(self) -> bool:
        """Whether the folder already holds a run, or what is left of one."""
        return self.run_json.exists() or self.trajectories.exists() or bool(self.row_files())

    def read_run_json(self) -> dict[str, Any]:
        """What the run was started with; empty when there is no such file or it is unreadable."""
        try:
            content = orjson.loads(self.run_json.read_bytes()) if self.run_json.is_file() else {}
        except (OSError, orjson.JSONDecodeError):
            return {}
        return content if isinstance(content, dict) else {}

    def own_options(self) -> dict[str, Any]:
        """The options that the run was started with, by flag name; empty when it was not, or `run.json` is damaged."""
        options = self.read_run_json().get("options")
        return options if isinstance(options, dict) else {}

    async def append(self, result: SampleResult) -> None:
        """Put a result's row where its outcome belongs, and return when it is on disk.

        Cancelling the caller does not stop an append that has begun.

        Raises:
            StorageError: the disk refused.
        """
        destination = OUTCOME_POLICY[result.summary.outcome].destination
        path = {
            Destination.SHARD: self.shard(result.batch_number),
            Destination.DISCARDED: self.discarded,
            Destination.FAILED: self.failed,
        }[destination]
        await self._append_line(path, result.row)

    async def log_event(self, event: str, **facts: object) -> None:
        """Add a JSON line to `run.log`."""
        await self._append_line(self.log, self._mask.json_bytes(orjson.dumps({"event": event, **facts})))

    async def _append_line(self, path: Path, line: bytes) -> None:
        if self._writer is None:
            raise StorageError(f"{path}: the run folder is not open for writing")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((path, line, written))
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
            self._draining.add_done_callback(self._after_drain)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            await asyncio.wait([written])
            written.exception()  # the caller is leaving; the run learns of a full disk from the next row
            raise

    async def _drain(self) -> None:
        """Write waiting lines, all that wait at once, until none are left."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            self._in_hand = group
            lines_by_path: dict[Path, list[bytes]] = defaultdict(list)
            for path, line, _ in group:
                lines_by_path[path].append(line)
            errors = await loop.run_in_executor(self._writer, _append_group, lines_by_path)
            for path, _, written in group:
                if path in errors:
                    written.set_exception(errors[path])
                else:
                    written.set_result(None)
            self._in_hand = []

    def _after_drain(self, drain: asyncio.Task[None]) -> None:
        """Whoever waits must not wait for ever when the writing was cancelled (the event loop ends) or broke."""
        if not drain.cancelled() and drain.exception() is None:
            return  # it left nothing, and what waits by now is the next one's
        reason = "the run is ending" if drain.cancelled() else repr(drain.exception())
        stranded, self._in_hand = self._in_hand, []
        if self._draining is drain:
            stranded, self._waiting = stranded + self._waiting, []
        for path, _, written in stranded:
            written.set_exception(StorageError(f"{path}: not written, {reason}; --resume goes on"))

    async def on_writer(self, write: Callable[[], T]) -> T:
        """Have several files written by the writer's thread: `close` waits for it, whatever became of the caller.

        Raises:
            StorageError: the folder is not open, or the disk refused.
        """
        if self._writer is None:
            raise StorageError(f"{self.path}: the run folder is not open for writing")
        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    async def publish_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Replace one of the folder's JSON files, indented for people. Raises StorageError."""
        await self.on_writer(partial(self.write_json, path, content))

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """`publish_json` for whoever has no event loop. Raises StorageError."""
        content = self._mask.value(content)
        write_atomic(path, [orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)])


def _append_group(lines_by_path: Mapping[Path, Sequence[bytes]]) -> dict[Path, StorageError]:
    """Append to several files; returns what was refused, by file."""
    errors = {}
    for path, lines in lines_by_path.items():
        try:
            append_lines(path, lines)
        except StorageError as exc:
            errors[path] = exc
    return errors
