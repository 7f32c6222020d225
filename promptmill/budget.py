"""Limits on a whole run: whether one more prompt may start.

A limit only stops the starting. What is in flight is let finish, what was not started stays pending, and so what a run
spends passes its limit by no more than what was in flight. Spending is counted from the rows of all starts, failed
attempts included; what a killed start had in flight is in no row and cannot be counted.

A prompt may start while what is spent, what is in flight and the prompt itself, each taken as the mean so far, stay
within the limit. Once it may not, none may, until the run is started again.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from promptmill.config import Limits
from promptmill.errors import OUTCOME_POLICY
from promptmill.flags import FAILURE_WINDOW, FAILURE_WINDOW_MIN
from promptmill.records import RowSummary, Usage
from promptmill.wording import counted

ROUNDING = 1 + 1e-9


@dataclass(slots=True)
class Spent:
    """What the rows of a run say was spent."""

    prompts: int = 0
    """Ended prompts, each attempt for itself, that have called the model at least once."""
    api_calls: int = 0
    usage: Usage = Usage()
    prompt_s: float = 0.0
    """Time of these prompts, added up."""
    latest: str = ""
    """When the last row of ours was made."""

    def add(self, summary: RowSummary) -> None:
        """Count a row."""
        if summary.content_hash:
            self.latest = max(self.latest, summary.timestamp)
        # A reply that became no turn is no call of the row's, but was paid.
        calls = max(summary.api_calls, summary.usage.reported_calls)
        if calls > 0:
            self.prompts += 1
            self.api_calls += calls
            self.usage += summary.usage
            self.prompt_s += summary.duration_s

    @property
    def cost_usd(self) -> float | None:
        """All that was paid; calls without a known cost are taken to have cost the mean. None when none has one."""
        return self._extended(self.usage.cost_usd, self.usage.priced_calls)

    @property
    def tokens(self) -> float | None:
        """All tokens, prompt and completion; None when no call reported any."""
        return self._extended(self.usage.total_tokens, self.usage.reported_calls)

    @property
    def mean_s(self) -> float:
        """A prompt's mean time."""
        return self.prompt_s / self.prompts if self.prompts else 0.0

    def _extended(self, known: float, known_calls: int) -> float | None:
        if not known_calls:
            return None if self.api_calls else 0.0
        return known * max(1.0, self.api_calls / known_calls)


class Budget:
    """Decides for one start of a run.

    Ask `may_start` before each prompt, and tell `ended` after it, or `let_go` where it will not end.
    """

    def __init__(
        self, limits: Limits, spent: Spent, elapsed_before_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.spent = spent
        self.stopped = ""
        """Why no prompt may start any more, as a sentence; empty while one may."""
        self.advice = ""
        """What to do about that."""
        self._elapsed_before_s = elapsed_before_s
        self._clock = clock
        self._started_s = clock()
        self._running: set[int] = set()
        """Batches of which a prompt is in flight."""
        self._recent_failures: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._failures: Counter[str] = Counter()

    def may_start(self, batch_number: int) -> bool:
        """Whether a prompt of a batch may start; if so, it counts as in flight from now on."""
        self._running.discard(batch_number)
        if not self.stopped:
            self._look_at_limits()
        if self.stopped:
            return False
        self._running.add(batch_number)
        return True

    def let_go(self, batch_number: int) -> None:
        """A batch of which a prompt may have been in flight is not run any further."""
        self._running.discard(batch_number)

    @property
    def in_flight(self) -> int:
        """How many prompts are."""
        return len(self._running)

    def ended(self, batch_number: int, summary: RowSummary) -> None:
        """Count a prompt that has ended."""
        self._running.discard(batch_number)
        self.spent.add(summary)
        has_failed = OUTCOME_POLICY[summary.outcome].is_failure
        self._recent_failures.append(has_failed)
        self._failures.update([summary.stop_reason] if has_failed else [])

    @property
    def elapsed_s(self) -> float:
        """Time of all starts of the run together."""
        return self._elapsed_before_s + self._clock() - self._started_s

    def spent_so_far(self) -> str:
        """What was spent, as a phrase."""
        cost_usd, tokens = self.spent.cost_usd, self.spent.tokens
        cost = "an unknown cost" if cost_usd is None else f"${cost_usd:.4f}"
        shown_tokens = "an unknown number of tokens" if tokens is None else f"{tokens:,.0f} tokens"
        return f"{cost}, {shown_tokens} and {self.elapsed_s:.0f} s for {counted(self.spent.prompts, 'prompt')}"

    def _look_at_limits(self) -> None:
        checks = {
            self._passed_cost: "with a higher limit, --resume goes on",
            self._passed_tokens: "with a higher limit, --resume goes on",
            self._passed_time: "with a higher limit, --resume goes on",
            self._unknown_cost: "--resume goes on with --price_per_mtok=IN,OUT, or with --max_cost_usd=none",
            self._unknown_tokens: "--resume goes on with --max_total_tokens=none",
            self._passed_failures: "mend the cause, then --resume",
        }
        for check, advice in checks.items():
            if reason := check():
                self.stopped, self.advice = reason, advice
                return

    def _unknown_cost(self) -> str:
        limit = self.limits.max_cost_usd
        if limit is None or self.spent.cost_usd is not None:
            return ""
        return f"--max_cost_usd={limit:g} cannot be kept: neither the endpoint nor a price list tells what calls cost"

    def _unknown_tokens(self) -> str:
        limit = self.limits.max_total_tokens
        if limit is None or self.spent.tokens is not None:
            return ""
        return f"--max_total_tokens={limit} cannot be kept: the endpoint does not report tokens"

    def _passed_cost(self) -> str:
        limit, cost_usd = self.limits.max_cost_usd, self.spent.cost_usd
        if limit is None or cost_usd is None:
            return ""
        return self._would_pass(f"--max_cost_usd={limit:g}", limit, cost_usd, lambda amount: f"${amount:.4f}")

    def _passed_tokens(self) -> str:
        limit, tokens = self.limits.max_total_tokens, self.spent.tokens
        if limit is None or tokens is None:
            return ""
        return self._would_pass(f"--max_total_tokens={limit}", limit, tokens, lambda amount: f"{amount:,.0f} tokens")

    def _would_pass(self, flag: str, limit: float, spent: float, shown: Callable[[float], str]) -> str:
        mean = spent / self.spent.prompts if self.spent.prompts else 0.0
        expected = spent + (len(self._running) + 1) * mean
        if expected <= limit * ROUNDING and (spent < limit or not mean):
            return ""
        flying = f", {len(self._running)} more in flight" if self._running else ""
        return f"{flag} is reached: {shown(spent)} for {counted(self.spent.prompts, 'prompt')}{flying}"

    def _passed_time(self) -> str:
        limit = self.limits.max_duration_s
        if limit is None or self.elapsed_s + self.spent.mean_s <= limit:
            return ""
        taken = f"{self.elapsed_s:.1f} s, and a prompt takes {self.spent.mean_s:.1f} s"
        return f"--max_duration_s={limit:g} is reached: {taken}"

    def _passed_failures(self) -> str:
        limit, failed = self.limits.max_failures, self._failures.total()
        if limit is None:
            return ""
        said = ""
        if isinstance(limit, int):
            said = f"{counted(failed, 'prompt')} of this start failed" if failed > limit else ""
        else:
            ended, recent = len(self._recent_failures), sum(self._recent_failures)
            if ended >= FAILURE_WINDOW_MIN and 100 * recent > float(limit.rstrip("%")) * ended:
                said = f"{recent} of the last {ended} prompts failed"
        if not said:
            return ""
        reason, times = self._failures.most_common(1)[0]
        return f"--max_failures={limit} is passed: {said}, {times} of them with {reason!r} (see failed.jsonl)"


def settled_starts(starts: object, latest: str) -> list[Mapping[str, Any]]:
    """The starts as `run.json` has them; one that was killed lasted until the last row was made."""
    settled: list[Mapping[str, Any]] = (
        [dict(start) for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    )
    if settled and not settled[-1].get("duration_s"):
        lasted_s = _seconds_between(settled[-1].get("started_at"), latest)
        settled[-1] = {**settled[-1], "duration_s": lasted_s}
    return settled


def duration_of(starts: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of some starts together."""
    durations = [start.get("duration_s") for start in starts]
    return float(sum(duration for duration in durations if isinstance(duration, int | float)))


def _seconds_between(started_at: object, latest: str) -> float:
    try:
        elapsed_s = (datetime.fromisoformat(latest) - datetime.fromisoformat(str(started_at))).total_seconds()
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, round(elapsed_s, 3))
