"""Quality filters: which rows the merge leaves out, and why."""

import pytest

from promptmill.filters import merge_rules, reason_to_leave_out
from promptmill.rows import summarise
from tests.rows import foreign_row, make_summary

TOOLS = ("terminal",)


def reason(summary, *, keep_no_reasoning=False):
    return reason_to_leave_out(summary, merge_rules(keep_no_reasoning=keep_no_reasoning), TOOLS)


def foreign(answer="<think>\nr\n</think>\n", **used):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": answer}]
    stats = {name: {"count": count, "success": count, "failure": 0} for name, count in used.items()}
    return summarise(foreign_row(conversations=turns, tool_stats=stats))


def test_a_row_with_reasoning_and_known_tools_stays():
    assert reason(make_summary(reasoning_turns=1, tools={"terminal": (1, 0)})) == ""


def test_a_row_without_reasoning_in_any_turn_is_left_out():
    assert reason(make_summary(reasoning_turns=0, assistant_turns=3)) == "no_reasoning"
    assert reason(make_summary(reasoning_turns=1, assistant_turns=3)) == ""


def test_a_row_without_reasoning_stays_when_those_are_kept():
    assert reason(make_summary(reasoning_turns=0), keep_no_reasoning=True) == ""


@pytest.mark.parametrize("keep_no_reasoning", [False, True])
def test_a_row_that_called_a_tool_that_does_not_exist_is_left_out(keep_no_reasoning):
    summary = make_summary(reasoning_turns=1, unknown_tools=["teleport"])
    assert reason(summary, keep_no_reasoning=keep_no_reasoning) == "hallucinated_tool"


def test_our_row_is_judged_by_its_own_list_not_by_its_columns():
    assert reason(make_summary(reasoning_turns=1, tools={"mcp_weather": (1, 0)})) == ""


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({"terminal": 1}, ""),
        ({"browser_click": 1}, ""),
        ({"teleport": 1}, "hallucinated_tool"),
        ({"teleport": 0}, ""),
    ],
)
def test_a_row_of_another_program_is_judged_by_the_tools_it_used(used, expected):
    assert reason(foreign(**used)) == expected


def test_a_row_of_another_program_is_judged_by_the_reasoning_in_its_turns():
    assert reason(foreign("<think>\n</think>\nyes")) == "no_reasoning"
