"""Builders that keep the tests short: valid rows, summaries, samples, settings and files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from promptmill.config import ModelSettings, options_from
from promptmill.endpoints import Endpoint
from promptmill.records import RowSummary, SampleResult
from promptmill.rows import DOCUMENTED_KEYS, OWN_DEFAULTS, has_reasoning, summarise

KNOWN_TOOLS = ("terminal", "read_file")


def make_row(
    prompt: str = "a",
    *,
    answer: str = "<think>\nr\n</think>\ndone",
    content_hash: str = "",
    tools: Mapping[str, tuple[int, int]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A full row of ours, completed and with reasoning, in key order.

    Args:
        content_hash: By default one made from the prompt.
        tools: Tool name -> (successes, failures).
        changes: Further keys, e.g. `outcome="discarded"`, `prompt_index=7`.
    """
    tallies = dict.fromkeys(KNOWN_TOOLS, (0, 0)) | dict(tools or {})
    row: dict[str, Any] = {
        "prompt_index": 0,
        "conversations": [
            {"from": "system", "value": "system"},
            {"from": "human", "value": prompt},
            {"from": "gpt", "value": answer},
        ],
        "metadata": {"batch_num": 0, "timestamp": "2026-01-30T10:00:00.123456", "model": "scripted"},
        "completed": True,
        "partial": False,
        "api_calls": 1,
        "toolsets_used": ["terminal"],
        "tool_stats": {n: {"count": s + f, "success": s, "failure": f} for n, (s, f) in tallies.items()},
        "tool_error_counts": {name: failures for name, (_, failures) in tallies.items()},
    }
    assert tuple(row) == DOCUMENTED_KEYS
    row |= OWN_DEFAULTS
    row |= {"outcome": "completed", "stop_reason": "answer", "content_hash": content_hash or hash_of(prompt)}
    row |= {"assistant_turns": 1, "reasoning_turns": int(has_reasoning(answer))}
    return row | changes


def foreign_row(prompt: str = "a", **changes: Any) -> dict[str, Any]:
    """A row of another program: the documented keys alone."""
    row = make_row(prompt)
    return {key: row[key] for key in DOCUMENTED_KEYS} | changes


def hash_of(text: str) -> str:
    """32 hex digits, another for each text."""
    return text.encode().hex().ljust(32, "0")[:32]


def make_summary(prompt: str = "a", **changes: Any) -> RowSummary:
    return summarise(make_row(prompt, **changes))


def make_result(prompt: str = "a", *, batch_number: int = 0, index: int = 0, **changes: Any) -> SampleResult:
    """What a worker hands over for a finished prompt."""
    row = make_row(prompt, **changes)
    return SampleResult(batch_number, index, orjson.dumps(row), summarise(row))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | bytes]) -> Path:
    """Write one line a row; bytes are a line as they are. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def prompts_in(path: Path) -> list[str]:
    """The prompt of each row of a file of trajectories."""
    return [next(t["value"] for t in row["conversations"] if t["from"] == "human") for row in read_jsonl(path)]


def write_dataset(folder: Path, rows: Iterable[str | Mapping[str, Any] | bytes], name: str = "prompts.jsonl") -> Path:
    """Write a dataset of prompts (text), rows (mappings) or lines (bytes). Returns its path."""
    return write_jsonl(folder / name, [{"prompt": row} if isinstance(row, str) else row for row in rows])


def make_settings(base_url: str, *, model: str = "test/model", api_key: str = "test-key", **rest: Any) -> ModelSettings:
    """The model half of a configuration, for an endpoint that needs no checking."""
    return ModelSettings(model=model, endpoint=Endpoint(base_url, api_key), **rest)


def options(**given: Any) -> dict[str, Any]:
    """Options as parsed from flags, with the required ones filled in."""
    return options_from({"dataset_file": "prompts.jsonl", "run_name": "my_run", **given})
