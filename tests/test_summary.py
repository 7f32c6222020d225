"""The printed summary: rows of other programs may name their tools as they like."""

import io

from rich.console import Console

from promptmill.statistics import RunFacts, RunStatistics, statistics_json
from promptmill.summary import print_summary


def test_a_hostile_tool_name_never_reaches_the_terminal_raw() -> None:
    name = "tool\x1b]0;owned\x07"
    counted = RunStatistics()
    counted.tool_successes[name] = 1
    screen = io.StringIO()
    facts = RunFacts(run_name="my_run", samples=1, not_selected=0, invalid=0, starts=[])
    print_summary(statistics_json(counted, facts, (name,)), "data/my_run", Console(file=screen, width=200))
    assert "\x1b" not in screen.getvalue()
    assert "tool\\x1b]0;owned\\x07" in screen.getvalue()
