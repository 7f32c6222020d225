"""What a run folder holds, read by itself: with nothing of the product's own reading."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.rows import read_jsonl

DERIVED = ("trajectories.jsonl", "checkpoint.json", "statistics.json", "run.json", "run.log")
FAILED = "failed.jsonl"
ENDPOINT = re.compile(r"http://\S+")
"""Each start of a run has its own; see `scripts`."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of a run folder, by file; torn last lines are none."""

    by_file: Mapping[str, list[Row]]

    @property
    def done(self) -> list[Row]:
        """What is not asked for again."""
        return [row for name, rows in self.by_file.items() if name != FAILED for row in rows]

    @property
    def all(self) -> list[Row]:
        return [row for rows in self.by_file.values() for row in rows]

    def done_samples(self) -> Counter[str]:
        """Prompt -> how many samples of it have a row that counts, each attempt of a sample for the same one."""
        return Counter(prompt for prompt, *_ in {(prompt_of(row), *identity_of(row)) for row in self.done})

    def prompts(self) -> Counter[str]:
        """Prompt -> rows of any kind."""
        return Counter(map(prompt_of, self.all))


def saved_rows(run: Path) -> SavedRows:
    """Every row that is on disk, each file sound but for a torn last line."""
    files = (*run.glob("batch_*.jsonl"), run / "discarded.jsonl", run / FAILED)
    return SavedRows({path.name: list(_rows(path)) for path in files if path.exists()})


def _rows(path: Path) -> Iterable[Row]:
    *lines, last = path.read_bytes().split(b"\n")
    for line in lines:
        yield orjson.loads(line)
    try:
        row = orjson.loads(last)
    except orjson.JSONDecodeError:
        return
    yield row


def prompt_of(row: Row) -> str:
    return str(next(turn["value"] for turn in row["conversations"] if turn["from"] == "human"))


def identity_of(row: Row) -> tuple[str, int]:
    return row["content_hash"], row["occurrence"]


def derived_files(run: Path) -> dict[str, bytes]:
    """The derived files that are replaced whole, as they are."""
    names = (name for name in DERIVED if name != "run.log")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def assert_derived_files_are_whole(run: Path, before: Mapping[str, bytes] | None = None) -> None:
    """After any kill: what is replaced whole is there whole, or as it was."""
    for name, content in derived_files(run).items():
        if before is not None and before.get(name) == content:
            continue
        if name.endswith(".json"):
            assert isinstance(orjson.loads(content), dict), name
        else:
            assert content == b"" or content.endswith(b"\n"), name
            assert all(isinstance(orjson.loads(line), dict) for line in content.splitlines()), name


# ── the same as an uninterrupted run ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Published:
    """A finished run. Taken out is what differs with each start: times, batch numbers, attempts, starts, endpoints."""

    trajectories: list[Any]
    discarded: list[Any]
    failed: list[Any]
    """The last failed attempt of each sample."""
    statistics: Mapping[str, Any]
    completed_prompts: list[int]
    batch_counts: Counter[str]
    """Added up over the batches. Without what failed: that is tried again at each start."""
    files: set[str]


def published(run: Path) -> Published:
    """What a finished run has to show."""
    statistics = orjson.loads((run / "statistics.json").read_bytes())
    checkpoint = orjson.loads((run / "checkpoint.json").read_bytes())
    failed = {identity_of(row): row for row in _all(run / FAILED)}
    batches: Counter[str] = Counter()
    for counts in checkpoint["batch_stats"].values():
        batches.update({name: count for name, count in counts.items() if name != "failed"})
    return Published(
        trajectories=sorted(map(_steady, _all(run / "trajectories.jsonl"))),
        discarded=sorted(map(_steady, _all(run / "discarded.jsonl"))),
        failed=sorted(map(_steady, failed.values())),
        statistics={name: value for name, value in statistics.items() if name not in ("duration_s", "starts")},
        completed_prompts=checkpoint["completed_prompts"],
        batch_counts=batches,
        files={path.name for path in run.iterdir() if not path.match("batch_*.jsonl")},
    )


def _all(path: Path) -> list[Row]:
    return [*read_jsonl(path)] if path.exists() else []


def _steady(row: Row) -> bytes:
    metadata = {name: value for name, value in row["metadata"].items() if name not in ("timestamp", "batch_num")}
    kept = {name: value for name, value in row.items() if name not in ("attempt", "duration_s")}
    error = ENDPOINT.sub("", row["error"])
    return orjson.dumps(kept | {"metadata": metadata, "error": error}, option=orjson.OPT_SORT_KEYS)
