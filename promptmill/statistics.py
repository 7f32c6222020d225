"""Totals over a run folder, made from its rows alone, so that they are the same after any crashes and resumes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptmill.budget import duration_of
from promptmill.errors import OUTCOME_POLICY, Outcome
from promptmill.records import RowSummary, Usage


@dataclass(slots=True)
class RunStatistics:
    """Counts over the rows of a run: add each row once, with the reason for which the merge left it out, if any."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """By outcome; rows that the merge left out are counted under `filtered` (or `discarded`) instead."""
    left_out: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    toolsets: Counter[str] = field(default_factory=Counter)
    tool_successes: Counter[str] = field(default_factory=Counter)
    tool_failures: Counter[str] = field(default_factory=Counter)
    unknown_tools: Counter[str] = field(default_factory=Counter)
    assistant_turns: int = 0
    reasoning_turns: int = 0
    api_calls: int = 0
    usage: Usage = Usage()
    superseded: int = 0
    """Finished rows in whose place a later attempt is."""
    not_in_dataset: int = 0
    """Finished rows of samples that are not in the dataset."""

    def add(self, summary: RowSummary, left_out: str = "") -> None:
        """Count one finished row (of a shard or of `discarded.jsonl`)."""
        if left_out == "no_reasoning":
            self.outcomes[Outcome.DISCARDED] += 1
        elif left_out:
            self.outcomes["filtered"] += 1
            self.left_out[left_out] += 1
        else:
            self.outcomes[summary.outcome] += 1
        self._add_work(summary)

    def add_failed(self, summary: RowSummary, *, counts: bool = True) -> None:
        """Count an attempt of `failed.jsonl`. Its cost was paid; its ending `counts` when it is its sample's last."""
        self._add_cost(summary)
        if counts and OUTCOME_POLICY[summary.outcome].is_failure:
            self.outcomes[summary.outcome] += 1
            self.stop_reasons[summary.stop_reason or "unknown"] += 1

    def add_left_behind(self, summary: RowSummary, *, superseded: bool) -> None:
        """Count a finished row that counts no more: a later attempt is in its place, or its sample is gone."""
        self._add_cost(summary)
        self.superseded += superseded
        self.not_in_dataset += not superseded

    def _add_cost(self, summary: RowSummary) -> None:
        self.api_calls += summary.api_calls
        self.usage += summary.usage

    def _add_work(self, summary: RowSummary) -> None:
        self.stop_reasons[summary.stop_reason or "unknown"] += 1
        for toolset in summary.toolsets:
            self.toolsets[toolset] += 1
        for name in summary.unknown_tools:
            self.unknown_tools[name] += 1
        for name, (successes, failures) in summary.tallies.items():
            self.tool_successes[name] += successes
            self.tool_failures[name] += failures
        self.assistant_turns += summary.assistant_turns
        self.reasoning_turns += summary.reasoning_turns
        self._add_cost(summary)

    @property
    def failed(self) -> int:
        """Samples whose last attempt failed."""
        return sum(self.outcomes[outcome] for outcome, policy in OUTCOME_POLICY.items() if policy.is_failure)

    @property
    def merged(self) -> int:
        """Rows of `trajectories.jsonl`."""
        return self.outcomes[Outcome.COMPLETED] + self.outcomes[Outcome.PARTIAL]

    @property
    def done(self) -> int:
        """Samples that a resume leaves alone."""
        return self.merged + self.outcomes[Outcome.DISCARDED] + self.outcomes["filtered"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the rows do not tell."""

    run_name: str
    samples: int
    """Valid rows of the dataset that the run is about."""
    not_selected: int
    """Lines of the dataset that `max_samples` left out."""
    invalid: int
    """Lines of the dataset that are no samples."""
    starts: Sequence[Mapping[str, Any]]
    """One mapping a start of the run, with `started_at` and `duration_s`."""
    unreadable_lines: int = 0
    """Lines of shards that are no rows."""
    uncounted_bytes: int = 0
    """The rest of a dataset that was too large to count what `max_samples` left out."""


def statistics_json(statistics: RunStatistics, facts: RunFacts, tool_names: Sequence[str]) -> dict[str, Any]:
    """The content of `statistics.json`."""
    turns, reasoned = statistics.assistant_turns, statistics.reasoning_turns
    outcomes = statistics.outcomes
    return {
        "run_name": facts.run_name,
        "samples": {
            "dataset_rows": facts.samples + facts.not_selected + facts.invalid,
            "completed": outcomes[Outcome.COMPLETED],
            "partial": outcomes[Outcome.PARTIAL],
            "discarded_no_reasoning": outcomes[Outcome.DISCARDED],
            "filtered": outcomes["filtered"],
            "failed": statistics.failed,
            "pending": max(0, facts.samples - statistics.done - statistics.failed),
            "not_selected": facts.not_selected,
            "invalid": facts.invalid,
        },
        "uncounted_dataset_bytes": facts.uncounted_bytes,
        "merged_rows": statistics.merged,
        "rows_left_behind": {
            "superseded": statistics.superseded,
            "not_in_dataset": statistics.not_in_dataset,
            "unreadable_lines": facts.unreadable_lines,
        },
        "filtered_by_reason": dict(sorted(statistics.left_out.items())),
        "failed_by_class": {
            str(outcome): outcomes[outcome] for outcome, policy in OUTCOME_POLICY.items() if policy.is_failure
        },
        "stop_reasons": dict(sorted(statistics.stop_reasons.items())),
        "tool_usage": {name: _tool_entry(statistics, name) for name in tool_names},
        "unknown_tools": dict(sorted(statistics.unknown_tools.items())),
        "toolsets": dict(sorted(statistics.toolsets.items())),
        "reasoning": {
            "assistant_turns": turns,
            "turns_with_reasoning": reasoned,
            "turns_without_reasoning": turns - reasoned,
            "coverage_percent": round(100 * reasoned / turns, 2) if turns else 0.0,
            "includes": "discarded and filtered rows",
        },
        "api_calls": statistics.api_calls,
        "tokens": {
            "prompt": statistics.usage.prompt_tokens,
            "completion": statistics.usage.completion_tokens,
            "reasoning": statistics.usage.reasoning_tokens,
            "cached": statistics.usage.cached_tokens,
            "calls_that_reported": statistics.usage.reported_calls,
            "includes": "failed, interrupted and superseded attempts",
        },
        "cost": {
            "usd": round(statistics.usage.cost_usd, 8) if statistics.usage.priced_calls else None,
            "calls_priced": statistics.usage.priced_calls,
            "includes": "failed, interrupted and superseded attempts",
        },
        "duration_s": round(duration_of(facts.starts), 3),
        "starts": list(facts.starts),
    }


def _tool_entry(statistics: RunStatistics, name: str) -> dict[str, Any]:
    success, failure = statistics.tool_successes[name], statistics.tool_failures[name]
    count = success + failure
    return {
        "count": count,
        "success": success,
        "failure": failure,
        "success_percent": round(100 * success / count, 2) if count else 0.0,
    }
