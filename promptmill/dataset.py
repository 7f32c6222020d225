"""The dataset: a JSONL file of prompts, scanned once and read again sample by sample.

The scan keeps 36 bytes a sample (place, hash, occurrence), never the prompts, so that a million prompts cost
megabytes. A sample's text is read when its batch is made.
"""

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from promptmill.errors import DatasetError, RunStoppedError
from promptmill.records import Sample

BOM = b"\xef\xbb\xbf"
HASH_BYTES = 16
MAX_NOTED_CWDS = 1000
MAX_COUNTED_BYTES = 1 << 30
"""How much of a file is read to count the lines that `max_samples` leaves out."""
MAX_NOTED_LINES = 10_000
"""How many of the lines that are no samples are remembered one by one."""
JSON_ARRAY = "a JSON array, not an object"
OWN_COLUMNS = frozenset({"prompt", "image", "docker_image", "cwd"})


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A line that is no sample."""

    line_number: int
    """From 1, as an editor counts."""
    reason: str


@dataclass(slots=True)
class Dataset:
    """The valid rows of a file, in its order."""

    path: Path
    fingerprint: str = ""
    """SHA-256 of what was read: the whole file, or up to the last sample that `max_samples` asked for."""
    skipped: list[SkippedLine] = field(default_factory=list)
    """Lines that are no samples; the first ten thousand of them."""
    invalid: int = 0
    """How many lines are no samples."""
    not_selected: int = 0
    """Lines after the last sample that `max_samples` asked for; whether they are samples was not looked at."""
    uncounted_bytes: int = 0
    """What is left of the file where it was too large to count all such lines."""
    first_line_by_cwd: dict[str, int] = field(default_factory=dict)
    """Where each `cwd` is first named; the first thousand of them."""
    _descriptor: int = -1
    _offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    _hashes: bytearray = field(default_factory=bytearray)
    _occurrences: "array[int]" = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self._occurrences)

    def content_hash(self, index: int) -> bytes:
        """Content hash (16 bytes) of one sample."""
        return bytes(self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def key(self, index: int) -> bytes:
        """What one sample is known by, see `identity_key`."""
        return identity_key(self.content_hash(index), self._occurrences[index])

    def sample(self, index: int, attempt: int = 1) -> Sample:
        """Read one sample.

        Raises:
            RunStoppedError: the file no longer holds what was scanned.
        """
        content_hash, occurrence = self.content_hash(index), self._occurrences[index]
        line = os.pread(self._descriptor, self._offsets[2 * index + 1], self._offsets[2 * index])
        try:
            row = _decode(line)
            is_same = row is not None and _hash(row) == content_hash
        except ValueError:
            row, is_same = None, False
        if row is None or not is_same:
            raise RunStoppedError(
                f"{self.path} was changed while the run was reading it; --resume goes on with the file as it is now"
            )
        extra = {name: value for name, value in row.items() if name not in OWN_COLUMNS}
        return Sample(
            index=index,
            prompt=row["prompt"],
            content_hash=content_hash.hex(),
            occurrence=occurrence,
            image=row.get("image") or row.get("docker_image") or "",
            cwd=row.get("cwd") or "",
            extra_json=orjson.dumps(extra).decode(),
            attempt=attempt,
        )

    def skip(self, line_number: int, reason: str) -> None:
        """Count a line that is no sample."""
        self.invalid += 1
        if len(self.skipped) < MAX_NOTED_LINES:
            self.skipped.append(SkippedLine(line_number, reason))

    def note_cwd(self, cwd: str, line_number: int) -> None:
        """Remember where a working folder is first named."""
        if cwd and len(self.first_line_by_cwd) < MAX_NOTED_CWDS:
            self.first_line_by_cwd.setdefault(cwd, line_number)

    def close(self) -> None:
        """Close the file; samples cannot be read any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def scan_dataset(
    path: Path, *, max_samples: int | None = None, advance: Callable[[int], None] = lambda _count: None
) -> Dataset:
    """Find the samples of a JSONL file.

    UTF-8 with or without BOM, LF or CRLF. Blank lines count for nothing; a line that is no JSON object with a
    non-empty text `prompt` is skipped and listed.

    Args:
        path: A regular file; it is read again later.
        max_samples: Stop after that many samples; of the rest of the file, lines are counted.
        advance: Told the number of bytes of each line, for a progress bar.

    Raises:
        DatasetError: the file cannot be read, or not one sample is in it.
    """
    dataset = Dataset(path)
    try:
        if not path.is_file():
            kind = "is no regular file" if path.exists() else "does not exist"
            raise DatasetError(f'--dataset_file={path} {kind}; give a JSONL file with one {{"prompt": "..."}} a line')
        _scan_lines(dataset, max_samples, advance)
        dataset._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise DatasetError(f"--dataset_file={path}: cannot read it ({exc.strerror})") from exc
    if dataset.skipped and dataset.skipped[0].reason == JSON_ARRAY:
        dataset.close()
        raise DatasetError(
            f"{path} is a JSON array and not JSONL: one object a line is needed, as `jq -c '.[]'` makes them"
        )
    if not len(dataset):
        detail = "".join(f"\n  line {line.line_number}: {line.reason}" for line in dataset.skipped[:10])
        dataset.close()
        raise DatasetError(f'{path}: no usable row; each line needs {{"prompt": "..."}}{detail}')
    return dataset


def identity_key(content_hash: bytes, occurrence: int) -> bytes:
    """What a sample is known by, as one short key: its hash and, for a repeated one, which of them it is."""
    return content_hash + occurrence.to_bytes(4, "big") if occurrence else content_hash


def _scan_lines(dataset: Dataset, max_samples: int | None, advance: Callable[[int], None]) -> None:
    seen: dict[bytes, int] = {}
    fingerprint = sha256()
    offset = 0
    with dataset.path.open("rb", buffering=1 << 20) as file:
        for number, line in enumerate(file, start=1):
            fingerprint.update(line)
            row = content_hash = None
            try:
                row = _decode(line)
                content_hash = None if row is None else _hash(row)
            except ValueError as exc:
                dataset.skip(number, str(exc))
            if row is not None and content_hash is not None:
                dataset.note_cwd(row.get("cwd") or "", number)
                occurrence = seen.get(content_hash, 0)
                seen[content_hash] = occurrence + 1
                dataset._offsets.extend((offset, len(line)))
                dataset._hashes += content_hash
                dataset._occurrences.append(occurrence)
            offset += len(line)
            advance(len(line))
            if max_samples is not None and len(dataset) >= max_samples:
                break
        dataset.not_selected, dataset.uncounted_bytes = _count_rest(file, advance)
    dataset.fingerprint = fingerprint.hexdigest()


def _count_rest(file: BinaryIO, advance: Callable[[int], None]) -> tuple[int, int]:
    """Lines that are not blank in the rest of a file, as far as they are cheap to count, and the bytes after that."""
    size = os.fstat(file.fileno()).st_size
    start = offset = file.tell()
    lines, is_new_line = 0, True
    while offset - start < MAX_COUNTED_BYTES and (piece := file.readline(1 << 20)):
        lines += is_new_line and not piece.isspace()
        is_new_line = piece.endswith(b"\n")
        offset += len(piece)
        advance(len(piece))
    return lines, max(0, size - offset)


def _decode(line: bytes) -> dict[str, Any] | None:
    """One line as a dataset row; None when it is blank. Raises ValueError with the reason when it is no sample."""
    content = line.removeprefix(BOM).strip()
    if not content:
        return None
    if content == b"[" or content.startswith((b"[{", b"[ {")):
        raise ValueError(JSON_ARRAY)
    try:
        row = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise ValueError(_json_fault(content, exc)) from exc
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    prompt = row.get("prompt")
    if "prompt" not in row:
        raise ValueError('no "prompt" field')
    if not isinstance(prompt, str):
        raise ValueError('"prompt" is not text')
    if not prompt.strip():
        raise ValueError('"prompt" is empty')
    for name in ("image", "docker_image", "cwd"):
        if not isinstance(row.get(name) or "", str):
            raise ValueError(f'"{name}" is not text')
    return row


def _json_fault(content: bytes, exc: orjson.JSONDecodeError) -> str:
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return f"not valid JSON ({exc.msg} at character {exc.pos + 1})"


def _hash(row: dict[str, Any]) -> bytes:
    """The identity of a row: the same for any spacing or order of keys. Raises ValueError when it has none."""
    try:
        canonical = orjson.dumps(row, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as exc:
        raise ValueError(f"nested too deeply ({exc})") from exc
    return blake2b(canonical, digest_size=HASH_BYTES).digest()
