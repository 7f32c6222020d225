"""What a whole run will take, from the prompts of a dry run: cost, tokens and time, each with a 95 % interval.

The interval is for the sum over the prompts that are left, and takes the ones that ran as a random sample of them
(Student's t). What already ran counts as it was.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from promptmill.budget import Spent
from promptmill.records import RowSummary
from promptmill.wording import counted, duration

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided quantiles for 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An expected sum and the interval it lies in; a single value tells no interval."""

    expected: float
    low: float | None = None
    high: float | None = None

    def shown(self, show: Callable[[float], str]) -> str:
        """`$2.10 ($1.90 to $2.30)`."""
        if self.low is None or self.high is None:
            return f"{show(self.expected)} (no interval: one prompt tells nothing of how much they differ)"
        return f"{show(self.expected)} ({show(self.low)} to {show(self.high)})"


def estimate_sum(values: Sequence[float], left: int, before: float = 0.0) -> Estimate:
    """The sum of all: `before`, the sample's own values, and as many more as are left."""
    mean, ran = statistics.fmean(values), before + math.fsum(values)
    expected = ran + left * mean
    if len(values) < 2:
        return Estimate(expected)
    freedom = len(values) - 1
    quantile = T_95[freedom - 1] if freedom <= len(T_95) else 1.96 + 2.5 / freedom
    spread = quantile * statistics.stdev(values) * math.sqrt(left + left**2 / len(values))
    return Estimate(expected, max(ran, expected - spread), expected + spread)


def estimate_lines(ran: Sequence[RowSummary], left: int, before: Spent, parallel: int) -> list[str]:
    """The estimate as lines for a person.

    Args:
        ran: The prompts of the dry run.
        left: How many prompts are left.
        before: What former starts have spent.
        parallel: How many of those that are left will be in flight at once.
    """
    told = [each for each in map(_alone, ran) if each.prompts]
    if not told:
        return ["Dry run: no prompt has called the model, so there is nothing to estimate from"]
    costs = [each.cost_usd for each in told if each.cost_usd is not None]
    tokens = [each.tokens for each in told if each.tokens is not None]
    cost = estimate_sum(costs, left, before.cost_usd or 0.0).shown(lambda usd: f"${usd:,.4f}") if costs else "unknown"
    total = (
        estimate_sum(tokens, left, before.tokens or 0.0).shown(lambda count: f"{count:,.0f}") if tokens else "unknown"
    )
    seconds = [each.prompt_s for each in told]
    time_left = estimate_sum(seconds, left, -math.fsum(seconds))
    ends = (time_left.expected, time_left.low, time_left.high)
    wall = Estimate(*(None if end is None else max(0.0, end) / parallel for end in ends))  # type: ignore[arg-type]
    return [
        f"Dry run of {counted(len(ran), 'prompt')}, {left:,} left. For the whole run, with 95 % intervals:",
        f"  cost    {cost}",
        f"  tokens  {total}",
        f"  time    {wall.shown(duration)} for those left, {parallel} in flight at once",
        "The rows are kept: --resume runs those left",
    ]


def _alone(summary: RowSummary) -> Spent:
    spent = Spent()
    spent.add(summary)
    return spent
