"""`checkpoint.json`: a summary of what is done, for people and for programs that read the documented file.

The shards are the truth; nothing in a run is decided by the checkpoint. Saving costs time that grows with the run, so
it is saved after each batch only as long as that takes under 2 % of the time, and always at the end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from promptmill.errors import OUTCOME_POLICY, Destination, Outcome

MAX_COST_SHARE = 0.02


@dataclass(slots=True)
class BatchCounts:
    """What came of one batch's samples."""

    processed: int = 0
    discarded: int = 0
    failed: int = 0


@dataclass(slots=True)
class Checkpoint:
    """Completed indices and per-batch counts of one run folder."""

    run_name: str
    done: bytearray
    """One byte a sample of the present dataset, 1 when done."""
    batches: dict[int, BatchCounts] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _next_save_s: float = 0.0

    def count(self, batch_number: int, outcome: Outcome, samples: int = 1) -> None:
        """Count ended samples of a batch."""
        counts = self.batches.setdefault(batch_number, BatchCounts())
        destination = OUTCOME_POLICY[outcome].destination
        counts.processed += samples * (destination is Destination.SHARD)
        counts.discarded += samples * (destination is Destination.DISCARDED)
        counts.failed += samples * OUTCOME_POLICY[outcome].is_failure

    @property
    def is_due(self) -> bool:
        """Whether saving again now would cost little, by what the last save took."""
        return self.clock() >= self._next_save_s

    def saved(self, cost_s: float) -> None:
        """Remember what a save took."""
        self._next_save_s = self.clock() + cost_s / MAX_COST_SHARE

    def content(self, last_updated: str) -> dict[str, Any]:
        """The documented content, JSON-ready."""
        return {
            "run_name": self.run_name,
            "completed_prompts": [index for index, is_done in enumerate(self.done) if is_done],
            "batch_stats": {
                str(number): {
                    "processed": counts.processed,
                    "discarded": counts.discarded,
                    "failed": counts.failed,
                }
                for number, counts in sorted(self.batches.items())
            },
            "last_updated": last_updated,
        }
