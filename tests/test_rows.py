"""Rows: every key, of one type, whoever wrote the row; and what is read back from one."""

import pytest

from promptmill.errors import Outcome
from promptmill.records import Usage
from promptmill.rows import (
    DOCUMENTED_KEYS,
    OWN_DEFAULTS,
    completed_row,
    has_reasoning,
    is_row,
    summarise,
    union_of_tools,
)
from tests.rows import foreign_row, hash_of, make_row

TOOLS = ("terminal", "read_file", "patch")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("<think>\nbecause\n</think>\nyes", True),
        ("<think>because</think>", True),
        ("\n<think>\nline\nline\n</think>yes", True),
        ("<think>\n</think>\nyes", False),
        ("<think></think>yes", False),
        ("<think>\n</think>\nwrite <think>x</think> around it", False),
        ("write <think>x</think> around it", False),
        ("<think>never closed", False),
        ("<REASONING_SCRATCHPAD>because</REASONING_SCRATCHPAD>yes", True),
        ("yes", False),
        ("", False),
    ],
)
def test_reasoning_is_what_a_turn_begins_with(value, expected):
    assert has_reasoning(value) is expected


@pytest.mark.parametrize("row", [make_row(), foreign_row(), {"conversations": [], "metadata": {}}])
def test_a_trajectory_is_a_row(row):
    assert is_row(row)


@pytest.mark.parametrize(
    "row",
    [
        None, [], "row", {}, {"conversations": []}, {"metadata": {}}, {"conversations": {}, "metadata": {}},
        {"conversations": [], "metadata": None}, {"conversations": ["hi"], "metadata": {}},
        {"conversations": [{"from": "human"}], "metadata": {}},
        {"conversations": [{"from": "human", "value": None}], "metadata": {}},
    ],
)  # fmt: skip
def test_anything_else_is_no_row(row):
    assert not is_row(row)


@pytest.mark.parametrize(
    "row",
    [make_row(tools={"patch": (1, 2)}), foreign_row(), {"conversations": [], "metadata": {}}],
    ids=["ours", "foreign", "bare"],
)
def test_a_completed_row_has_every_key_in_order_of_one_type_and_no_null(row):
    completed = completed_row(row, TOOLS)
    assert tuple(completed) == (*DOCUMENTED_KEYS, *OWN_DEFAULTS)
    assert [type(value) for value in completed.values()] == [type(value) for value in make_row().values()]
    assert tuple(completed["tool_stats"]) == tuple(completed["tool_error_counts"]) == TOOLS
    assert completed_row(completed, TOOLS) == completed


def test_tool_columns_are_the_tools_of_the_run_zero_when_unused():
    completed = completed_row(make_row(tools={"patch": (1, 2)}), TOOLS)
    assert completed["tool_stats"]["patch"] == {"count": 3, "success": 1, "failure": 2}
    assert completed["tool_stats"]["terminal"] == {"count": 0, "success": 0, "failure": 0}
    assert completed["tool_error_counts"] == {"terminal": 0, "read_file": 0, "patch": 2}


STRANGE = [None, "x", 3, 1.5, [], [None], {}, {"terminal": None}, {"terminal": {"count": "x"}}, "f" * 32]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize(
    "key", [key for key in (*DOCUMENTED_KEYS, *OWN_DEFAULTS) if key not in ("conversations", "metadata")]
)
def test_a_value_of_another_type_breaks_nothing(key, value):
    row = foreign_row(**{key: value})
    summary = summarise(row)
    hash(summary.batch_number), hash(summary.stop_reason), hash(summary.toolsets), hash(summary.unknown_tools)
    assert [type(value) for value in completed_row(row, TOOLS).values()] == [type(v) for v in make_row().values()]


@pytest.mark.parametrize("metadata", [{"batch_num": "7", "timestamp": 3}, {"batch_num": None}, {}])
def test_metadata_of_another_shape_breaks_nothing(metadata):
    assert summarise(foreign_row(metadata=metadata)).batch_number == 0


def test_our_row_says_all_that_statistics_and_resume_need():
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "reasoning_tokens": 3, "cached_tokens": 2, "reported_calls": 1}
    row = make_row(
        "a", tools={"terminal": (2, 1)}, usage=usage, assistant_turns=4, reasoning_turns=3, occurrence=2, image="i",
        cwd="/w", unknown_tools=["nope"], error="e", api_calls=4,
    )  # fmt: skip
    summary = summarise(row)
    assert (summary.prompt, summary.image, summary.cwd) == ("a", "i", "/w")
    assert (summary.content_hash, summary.occurrence) == (hash_of("a"), 2)
    assert summary.tallies == {"terminal": (2, 1)}
    assert summary.usage == Usage(7, 5, 3, 2, 1)
    assert (summary.reasoning_turns, summary.api_calls, summary.unknown_tools, summary.error) == (3, 4, ("nope",), "e")
    assert summary.toolsets == ("terminal",)
    assert summary.timestamp == "2026-01-30T10:00:00.123456"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"outcome": "discarded"}, Outcome.DISCARDED),
        ({"outcome": "failed_transient"}, Outcome.FAILED_TRANSIENT),
        ({"outcome": ""}, Outcome.COMPLETED),
        ({"outcome": "no such outcome"}, Outcome.COMPLETED),
        ({"outcome": None, "completed": False}, Outcome.PARTIAL),
    ],
)
def test_the_outcome_is_read_or_follows_from_completed(changes, outcome):
    assert summarise(make_row(**changes)).outcome is outcome


def test_a_foreign_rows_reasoning_is_counted_from_its_turns():
    turns = [
        ("human", "a"),
        ("gpt", "<think>\nr\n</think>\n1"),
        ("gpt", "<think>\n</think>\n2"),
        ("tool", "<think>x</think>"),
    ]
    row = foreign_row(conversations=[{"from": who, "value": value} for who, value in turns])
    summary = summarise(row)
    assert (summary.assistant_turns, summary.reasoning_turns, summary.content_hash) == (2, 1, "")


def test_the_prompt_is_the_first_human_turn():
    row = make_row("a")
    row["conversations"].append({"from": "human", "value": "b"})
    assert summarise(row).prompt == "a"
    assert summarise({"conversations": [], "metadata": {}}).prompt == ""


def test_the_union_of_tools_keeps_our_order_and_sorts_the_rest():
    assert union_of_tools(("b", "a"), ["z", "a", "c"]) == ("b", "a", "c", "z")
