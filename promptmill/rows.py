"""The saved row: its keys and their order, and what is read back from it.

Every row has every key, always of one type, never null: that is what lets `datasets` load a file of them. Rows that
other programs wrote have only the documented keys; `completed_row` gives them ours.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import ne
from typing import Any

import orjson

from promptmill.errors import Outcome
from promptmill.records import RowSummary, Usage

MAX_COUNT = 2**53
"""What a count is cut to: exact in every reader of JSON, and far from where sums of them stop fitting."""
DOCUMENTED_DEFAULTS: Mapping[str, Any] = {
    "prompt_index": -1,
    "conversations": [],
    "metadata": {},
    "completed": False,
    "partial": False,
    "api_calls": 0,
    "toolsets_used": [],
    "tool_stats": {},
    "tool_error_counts": {},
}
DOCUMENTED_KEYS = tuple(DOCUMENTED_DEFAULTS)
OWN_DEFAULTS: Mapping[str, Any] = {
    "outcome": "",
    "stop_reason": "",
    "error": "",
    "content_hash": "",
    "occurrence": 0,
    "attempt": 1,
    "image": "",
    "cwd": "",
    "extra": "{}",
    "tools": "[]",
    "unknown_tools": [],
    "repaired_tools": [],
    "usage": {
        "prompt_tokens": 0, "completion_tokens": 0, "reasoning_tokens": 0, "cached_tokens": 0, "reported_calls": 0,
        "cost_usd": 0.0, "priced_calls": 0,
    },
    "assistant_turns": 0,
    "reasoning_turns": 0,
    "duration_s": 0.0,
    "seed": 0,
    "settings": "{}",
}  # fmt: skip
"""Our keys, after the documented ones, in this order."""
_DEFAULTS = {**DOCUMENTED_DEFAULTS, **OWN_DEFAULTS}
ALL_KEYS = tuple(_DEFAULTS)
UNUSED = {"count": 0, "success": 0, "failure": 0}
METADATA_KEYS = ("batch_num", "timestamp", "model")
_TYPES = tuple(map(type, _DEFAULTS.values()))
_USAGE_KEYS, _USAGE_TYPES = tuple(OWN_DEFAULTS["usage"]), tuple(map(type, OWN_DEFAULTS["usage"].values()))

_LEADING_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_CONTENT_HASH = re.compile(r"[0-9a-f]{32}")
_OUTCOMES = {str(outcome): outcome for outcome in Outcome}


def has_reasoning(value: str) -> bool:
    """Whether an assistant turn's text begins with reasoning that is not blank; a tag further on is quoted text."""
    leading = _LEADING_THINK.match(value)
    return bool(leading and leading[1].strip()) or "<REASONING_SCRATCHPAD>" in value


def normalised_tool_columns(row: Mapping[str, Any], tool_names: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """`tool_stats` and `tool_error_counts` with exactly `tool_names` as keys, in that order, zero when unused."""
    stats = _typed(row, "tool_stats")
    columns = {name: _tally(stats.get(name)) for name in tool_names}
    return columns, {name: tally["failure"] for name, tally in columns.items()}


def _tally(value: object) -> dict[str, int]:
    entry = value if isinstance(value, Mapping) else {}
    return {key: _whole(entry.get(key)) for key in ("count", "success", "failure")}


def _whole(value: object) -> int:
    """A count that another program wrote; 0 when it is none."""
    if type(value) is int and -MAX_COUNT <= value <= MAX_COUNT:
        return value
    return max(-MAX_COUNT, min(value, MAX_COUNT)) if isinstance(value, int) else 0


def _usage(row: Mapping[str, Any]) -> dict[str, int | float]:
    """A row's `usage` with every key, each of its type."""
    usage: dict[str, int | float] = _typed(row, "usage")
    is_as_written = tuple(map(type, usage.values())) == _USAGE_TYPES and tuple(usage) == _USAGE_KEYS
    if is_as_written and min(usage.values()) >= 0 and max(usage.values()) <= MAX_COUNT:
        return usage  # as we write it: every row of every scan comes by here
    return {
        name: _amount(usage.get(name)) if isinstance(default, float) else _whole(usage.get(name))
        for name, default in OWN_DEFAULTS["usage"].items()
    }


def _amount(value: object) -> float:
    """A number from 0 that another program may have written; 0 when it is none."""
    if type(value) is float and 0.0 <= value <= MAX_COUNT:
        return value
    return float(max(0, min(value, MAX_COUNT))) if isinstance(value, int | float) else 0.0


def completed_row(row: Mapping[str, Any], tool_names: Sequence[str]) -> dict[str, Any]:
    """A row with every key in order and of its type, whoever wrote it."""
    stats, errors = normalised_tool_columns(row, tool_names)
    full = {key: _typed(row, key) for key in ALL_KEYS}
    return full | {"tool_stats": stats, "tool_error_counts": errors, "usage": _usage(row)}


def is_ours(row: Mapping[str, Any]) -> bool:
    """Whether a row has our keys, in our order and each of its type, as we write them."""
    return (
        tuple(row) == ALL_KEYS
        and tuple(map(type, row.values())) == _TYPES
        and _CONTENT_HASH.fullmatch(row["content_hash"]) is not None
    )


def has_final_shape(row: Mapping[str, Any], tool_names: Sequence[str]) -> bool:
    """Whether a row of ours (`is_ours`) is one with just these tools: `completed_row` would change nothing."""
    return (
        list(row["tool_stats"]) == list(row["tool_error_counts"]) == list(tool_names)
        and tuple(row["metadata"]) == METADATA_KEYS
        and tuple(row["usage"]) == _USAGE_KEYS
    )


def _typed(row: Mapping[str, Any], key: str) -> Any:
    """A row's value where it has the key's type, else the key's default: other programs use our names as they like."""
    default = _DEFAULTS[key]
    value = row.get(key)
    return value if isinstance(value, type(default)) else default


def is_row(row: object) -> bool:
    """Whether a decoded line is a trajectory: the documented keys that nothing can do without, of their types."""
    if not isinstance(row, dict):
        return False
    turns = row.get("conversations")
    if not isinstance(turns, list) or not isinstance(row.get("metadata"), dict):
        return False
    return all(map(_is_turn, turns))


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)


def decoded_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row, or None where it is none."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if is_row(row) else None


def prompt_of(row: Mapping[str, Any]) -> str:
    """The dataset's prompt: the first human turn."""
    return next((turn["value"] for turn in row["conversations"] if turn.get("from") == "human"), "")


def summarise(row: Mapping[str, Any]) -> RowSummary:
    """Read a decoded row (see `is_row`) into what statistics, progress and resume need. Never fails."""
    is_as_written = is_ours(row)  # then nothing need be checked twice: millions of rows come by here
    read = row.__getitem__ if is_as_written else partial(_typed, row)
    content_hash = read("content_hash")
    has_hash = is_as_written or _CONTENT_HASH.fullmatch(content_hash) is not None
    answers = () if is_as_written else [turn["value"] for turn in row["conversations"] if turn.get("from") == "gpt"]
    return RowSummary(
        content_hash=content_hash if has_hash else "",
        occurrence=read("occurrence"),
        prompt=prompt_of(row),
        image=read("image"),
        cwd=read("cwd"),
        batch_number=_whole(row["metadata"].get("batch_num")),
        outcome=_outcome(row),
        stop_reason=read("stop_reason"),
        assistant_turns=_whole(read("assistant_turns")) if is_as_written else len(answers),
        reasoning_turns=_whole(read("reasoning_turns")) if has_hash else sum(map(has_reasoning, answers)),
        api_calls=_whole(read("api_calls")),
        tallies=_used_tools(read("tool_stats")),
        unknown_tools=tuple(map(str, read("unknown_tools"))),
        toolsets=tuple(map(str, read("toolsets_used"))),
        usage=Usage(**_usage(row)),  # type: ignore[arg-type]  # each is of its default's type
        timestamp=str(row["metadata"].get("timestamp") or ""),
        error=read("error"),
        duration_s=_amount(row.get("duration_s")),
        attempt=read("attempt"),
        is_ours=is_as_written,
    )


def _outcome(row: Mapping[str, Any]) -> Outcome:
    if (outcome := _OUTCOMES.get(_typed(row, "outcome"))) is not None:
        return outcome
    return Outcome.COMPLETED if row.get("completed") else Outcome.PARTIAL


def _used_tools(stats: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    used = [(name, _tally(value)) for name, value in compress(stats.items(), map(ne, stats.values(), repeat(UNUSED)))]
    return {name: (tally["success"], tally["failure"]) for name, tally in used if any(tally.values())}


def union_of_tools(known: Sequence[str], used: Iterable[str]) -> tuple[str, ...]:
    """The tool columns of a merge: the known tools in their order, then any others by name."""
    return (*known, *sorted(set(used) - set(known)))
