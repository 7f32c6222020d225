"""What a person sees while a run is on: a bar where stderr is a terminal, plain lines at intervals elsewhere."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from promptmill.errors import OUTCOME_POLICY, Destination
from promptmill.escaping import escaped
from promptmill.records import RowSummary, TurnEvent
from promptmill.secrets import NO_SECRETS, Mask

PLAIN_INTERVAL_S = 10.0
BAR_DELAY_S = 1.0
BAR_STEP_BYTES = 1 << 17
"""Between two updates of a bar over bytes: each costs as much as reading a short line."""
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} prompts [{elapsed}<{remaining}{postfix}]"


class TolerantStream:
    """A stream whose reader may go away: what it says is decoration, and no run ends for want of somebody who looks."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        """None when there is none, or nobody reads it any more."""

    def write(self, text: str) -> int:
        """Write, or drop what nobody can see."""
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if anybody reads."""
        self._try(lambda stream: stream.flush())

    @property
    def encoding(self) -> str:
        """What the stream can show: tqdm draws its bar by it."""
        return (self._stream.encoding if self._stream is not None else "") or "ascii"

    def isatty(self) -> bool:
        """Whether a bar can be drawn: on a terminal that has a size (those of some CI machines have none)."""
        try:
            return self._stream is not None and self._stream.isatty() and all(os.get_terminal_size(self.fileno()))
        except OSError:
            return False

    def fileno(self) -> int:
        """The descriptor, by which tqdm asks for the width. Raises OSError when there is none."""
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def _try(self, action: Callable[[TextIO], object]) -> None:
        if self._stream is not None:
            try:
                action(self._stream)
            except (OSError, ValueError):
                self._stream = None


class Progress:
    """Counts ended samples and shows them. Not for use by several threads."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, mask: Mask = NO_SECRETS
    ) -> None:
        self._stream = TolerantStream(stream if stream is not None else sys.stderr)
        self._mask = mask
        self._clock = clock
        self._bar: tqdm[Any] | None = None
        self._counts: Counter[Destination] = Counter()
        self._tokens = self._limit = self._refusals = 0
        self._started_s = self._last_line_s = clock()
        self._total = self._done_before = 0
        self._counted_last = -1
        """What the last plain line said."""
        self._has_shown_failure = False
        self._stops_at_s: float | None = None
        """When what is in flight is cancelled; None while prompts may start."""

    @property
    def is_terminal(self) -> bool:
        """Whether a bar can be drawn."""
        return self._stream.isatty()

    def note(self, line: str) -> None:
        """Print a line, above the bar where there is one. The line is trusted up to control characters."""
        text = "\n".join(escaped(part) for part in self._mask.text(line).split("\n"))
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def start(self, total: int, done_before: int) -> None:
        """Begin to count: `total` samples in all, of which `done_before` were done by earlier starts."""
        self._total, self._done_before = total, done_before
        self._started_s = self._last_line_s = self._clock()
        if self.is_terminal:
            self._bar = tqdm(
                total=total, initial=done_before, file=self._stream, dynamic_ncols=True, bar_format=BAR_FORMAT
            )

    def sample_finished(self, summary: RowSummary) -> None:
        """Count one ended sample; the first failure is shown at once."""
        destination = OUTCOME_POLICY[summary.outcome].destination
        self._counts[destination] += 1
        self._tokens += summary.usage.completion_tokens
        if destination is Destination.FAILED and not self._has_shown_failure:
            self._has_shown_failure = True
            self.note(f"first failure ({summary.stop_reason}): {summary.error[:500]}")
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(), refresh=False)
            self._bar.update(1)
        else:
            self.tick()

    def tick(self) -> None:
        """Show how things stand, though nothing may have ended since; to be called every few seconds."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures())
        elif self._total and self._clock() - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s, self._counted_last = self._clock(), self._finished
            self.note(self._plain_line())

    def stopping(self, grace_s: float) -> None:
        """No further prompt starts; those in flight have so long to finish."""
        self._stops_at_s = self._clock() + grace_s
        if self._bar is not None:
            self.tick()

    def limit_changed(self, limit: int, refusals: int) -> None:
        """Remember how many requests the endpoint takes at once; shown once it has refused any."""
        self._limit, self._refusals = limit, refusals

    def turn(self, event: TurnEvent) -> None:
        """Show one line of `--verbose`."""
        self.note(f"[{event.index}] {event.text}")

    def finish(self) -> None:
        """Take the bar down, with the last counts left on the screen. Safe to call twice."""
        if self._stops_at_s is not None:
            self._stops_at_s = self._clock()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._total and self._finished and self._counted_last != self._finished:
            self.note(self._plain_line())
        self._total = 0

    @property
    def _finished(self) -> int:
        return sum(self._counts.values())

    def _figures(self) -> str:
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        parts = [f"done {self._counts[Destination.SHARD]}"]
        parts += [f"failed {self._counts[Destination.FAILED]}"] if self._counts[Destination.FAILED] else []
        parts += [f"discarded {self._counts[Destination.DISCARDED]}"] if self._counts[Destination.DISCARDED] else []
        parts += [f"limit {self._limit} ({self._refusals} refused)"] if self._refusals else []
        if self._stops_at_s is not None:
            left_s = self._stops_at_s - self._clock()
            parts += [f"stopping in {left_s:.0f} s at the latest" if left_s > 0 else "stopping"]
        return ", ".join(
            [*parts, f"{60 * self._finished / elapsed_s:.1f}/min", f"{self._tokens / elapsed_s:.0f} tok/s"]
        )

    def _plain_line(self) -> str:
        finished = self._finished
        elapsed_s = self._clock() - self._started_s
        left = self._total - self._done_before - finished
        has_end = finished and left > 0 and self._stops_at_s is None
        eta = f", {left * elapsed_s / finished:.0f} s left" if has_end else ""
        return f"{self._done_before + finished}/{self._total} prompts ({self._figures()}{eta})"


@contextmanager
def byte_bar(description: str, total_bytes: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """A bar over bytes for a scan or a merge; it appears only when that takes over a second, on a terminal."""
    out = TolerantStream(stream if stream is not None else sys.stderr)
    with tqdm(
        total=total_bytes, desc=description, unit="B", unit_scale=True, delay=BAR_DELAY_S, leave=False, file=out,
        disable=not out.isatty(),
    ) as bar:  # fmt: skip
        waiting = 0

        def advance(count: int) -> None:
            nonlocal waiting
            waiting += count
            if waiting >= BAR_STEP_BYTES:
                bar.update(waiting)
                waiting = 0

        yield advance
