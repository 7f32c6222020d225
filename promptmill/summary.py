"""What a person sees when a run has ended: the statistics as tables. Made from `statistics.json`'s content alone."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from promptmill.escaping import escaped
from promptmill.wording import counted, duration


def print_summary(statistics: Mapping[str, Any], run_dir: str, console: Console | None = None) -> None:
    """Print the summary of a run to standard output."""
    console = console or Console()
    with suppress(OSError):  # nobody looks any more
        console.print(_summary(statistics, run_dir), soft_wrap=False)


def print_lines(lines: Sequence[str]) -> None:
    """Print some lines to standard output, after an empty one."""
    with suppress(OSError):
        Console().print(Text("\n".join(["", *lines])))


def _summary(statistics: Mapping[str, Any], run_dir: str) -> Group:
    parts: list[Any] = [
        Text(),
        Text(f"Run {escaped(statistics['run_name'])}", style="bold"),
        _samples_table(statistics["samples"], statistics["uncounted_dataset_bytes"]),
        Text(),
        _facts_table(statistics),
    ]
    used = {name: entry for name, entry in statistics["tool_usage"].items() if entry["count"]}
    if used:
        parts += [Text(), _tools_table(used)]
    if statistics["samples"]["failed"]:
        parts += [Text(), Text(f"What failed, and why, is in {escaped(run_dir)}/failed.jsonl")]
    if statistics["samples"]["discarded_no_reasoning"] and not statistics["merged_rows"]:
        cure = "No row has reasoning, and all were discarded: --resume --keep_no_reasoning brings them back"
        parts += [Text(), Text(cure)]
    reasons = statistics["filtered_by_reason"]
    if reasons:
        shown = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        parts += [Text(), Text(f"Left out of the merge by a filter: {shown}")]
    parts += [Text(), *map(Text, left_behind)] if (left_behind := _left_behind(statistics["rows_left_behind"])) else []
    rows = f"{counted(statistics['merged_rows'], 'row')} in {escaped(run_dir)}/trajectories.jsonl"
    parts += [Text(), Text(rows, style="bold")]
    return Group(*parts)


def _left_behind(rows: Mapping[str, int]) -> list[str]:
    """Rows that the run folder keeps and the merge does not take."""
    said = []
    if rows["superseded"]:
        said.append(f"Replaced by a later attempt, and kept in their files: {counted(rows['superseded'], 'row')}")
    if rows["not_in_dataset"]:
        kept = counted(rows["not_in_dataset"], "row")
        said.append(f"Of prompts that are not in the dataset now, kept but not merged: {kept}")
    if rows["unreadable_lines"]:
        said.append(f"No readable row, and left out: {counted(rows['unreadable_lines'], 'line')}")
    return said


def _samples_table(samples: Mapping[str, int], uncounted_bytes: int) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("rows of the dataset", f"{samples['dataset_rows']:,}")
    labels = {
        "completed": "completed",
        "partial": "partial (turn limit, output cut, time spent …)",
        "discarded_no_reasoning": "discarded (no reasoning in any turn)",
        "filtered": "filtered at the merge",
        "failed": "failed (run again on --resume)",
        "pending": "pending (not started or interrupted)",
        "not_selected": "not selected (--max_samples)",
        "invalid": "invalid (no prompt in them; listed in run.json)",
    }
    for key, label in labels.items():
        if key in ("not_selected", "invalid") and not samples[key]:
            continue
        table.add_row(f"  {label}", f"{samples[key]:,}", style="" if samples[key] else "dim")
    if uncounted_bytes:
        table.add_row("  and what was not counted of the dataset", f"{uncounted_bytes / 1e9:,.1f} GB")
    return table


def _facts_table(statistics: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column()
    reasoning, tokens = statistics["reasoning"], statistics["tokens"]
    table.add_row(
        "Reasoning coverage",
        f"{reasoning['coverage_percent']:.1f} % of {reasoning['assistant_turns']:,} assistant turns, "
        f"{reasoning['includes']} included",
    )
    reported, calls = tokens["calls_that_reported"], statistics["api_calls"]
    if not calls:
        table.add_row("Tokens", "none: no call was answered")
    elif reported:
        known = "" if reported >= calls else f" (reported by {reported:,} of {calls:,} calls)"
        table.add_row("Tokens", f"{tokens['prompt']:,} prompt, {tokens['completion']:,} completion{known}")
    else:
        table.add_row("Tokens", "unknown: the endpoint reports none")
    table.add_row("Cost", _cost(statistics["cost"], calls))
    table.add_row("Model calls", f"{calls:,}")
    starts = len(statistics["starts"])
    table.add_row(
        "Duration", f"{duration(statistics['duration_s'])}" + (f" over {starts} starts" if starts > 1 else "")
    )
    return table


def _cost(cost: Mapping[str, Any], calls: int) -> str:
    if not calls:
        return "none: no call was answered"
    if cost["usd"] is None:
        return "unknown: the endpoint reports none; --price_per_mtok=IN,OUT gives prices"
    priced = cost["calls_priced"]
    known = "" if priced >= calls else f" (for {priced:,} of {calls:,} calls; the rest is unknown)"
    return f"${cost['usd']:,.4f}{known}"


def _tools_table(used: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim")
    for column in ("tool", "calls", "succeeded", "failed", "success"):
        table.add_column(column, justify="left" if column == "tool" else "right")
    for name, entry in sorted(used.items(), key=lambda item: -item[1]["count"]):
        table.add_row(
            Text(escaped(name)), f"{entry['count']:,}", f"{entry['success']:,}", f"{entry['failure']:,}",
            f"{entry['success_percent']:.1f} %",
        )  # fmt: skip
    return table
