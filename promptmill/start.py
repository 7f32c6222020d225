"""One start of a run, between the opening and the closing of its folder: from the resume scan to the summary."""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from typing import Any

from promptmill import __version__
from promptmill.batches import make_batches
from promptmill.budget import Budget, Spent, duration_of, settled_starts
from promptmill.checkpoint import Checkpoint
from promptmill.config import RunConfig, WorkerSettings, environment
from promptmill.dataset import Dataset
from promptmill.engines import engine_class
from promptmill.errors import OUTCOME_POLICY, LimitReachedError, Outcome
from promptmill.estimate import estimate_lines
from promptmill.local_model import served
from promptmill.preflight import Preflight
from promptmill.progress import Progress, byte_bar
from promptmill.publish import publish
from promptmill.records import Batch, RowSummary, SampleResult, TurnEvent
from promptmill.resume import ScannedRows, match_done, scan_rows
from promptmill.run_folder import RunFolder
from promptmill.summary import print_lines, print_summary
from promptmill.wording import counted

WARN_AFTER_DISCARDED = 20
TICK_S = 2.0
DEMONSTRATION_NOTE = (
    "The demonstration model (135M parameters) proves the plumbing, not quality: "
    "for real work give --model=local:FILE.gguf, or --model and --base_url"
)


class RunStart:
    """Runs what is owed and publishes what is there. Takes what workers finish (`WorkerEvents`)."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, folder: RunFolder, progress: Progress, settled: Preflight
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.folder = folder
        self.progress = progress
        self.settled = settled
        self.scanned = ScannedRows()
        self.checkpoint = Checkpoint(config.run_name, bytearray(len(dataset)))
        self.statistics: Mapping[str, Any] = {}
        """The content of `statistics.json`, after `go`."""
        self._finished = self._discarded = 0
        self._starts: list[Mapping[str, Any]] = []
        """Former starts."""
        self._budget = Budget(config.limits, Spent(), 0.0)
        self._drawn: Sequence[int] | None = None
        """Indices of the samples that a dry run runs; None for all that are owed."""
        self._spent_before = Spent()
        self._ran: list[RowSummary] = []
        """What a dry run has run."""

    async def go(self) -> None:
        """Everything from the resume scan to the printed summary."""
        for note in self.settled.notes:
            self.progress.note(note)
        await asyncio.to_thread(self._scan)
        before = sum(self.checkpoint.done)
        if before:
            self.progress.note(f"Resuming: {before:,} of {len(self.dataset):,} prompts are done")
        if self.config.limits.are_set and self._starts:
            self.progress.note(f"Former starts spent {self._budget.spent_so_far()}")
        if before == len(self.dataset):
            await self._run(None)
            return
        async with served(
            self.config.model, parallel=self.config.num_workers, environ=environment(), note=self.progress.note
        ) as model:
            await self._run(self.settled.worker.with_model(model))

    def _scan(self) -> None:
        files = self.folder.row_files()
        with byte_bar("Reading finished rows", sum(path.stat().st_size for path in files)) as advance:
            self.scanned = scan_rows(files, advance)
        for (batch_number, outcome), samples in self.scanned.endings.items():
            self.checkpoint.count(batch_number, outcome, samples)
        self.checkpoint.done = match_done(self.dataset, self.scanned.done)
        self._starts = settled_starts(self.folder.read_run_json().get("starts"), self.scanned.spent.latest)
        self._budget = Budget(self.config.limits, self.scanned.spent, duration_of(self._starts))
        self._spent_before = replace(self.scanned.spent)
        if self.config.dry_run is not None:
            owed = list(self._owed())
            rng = random.Random(f"dry_run:{self.config.seed}")
            self._drawn = sorted(rng.sample(owed, min(self.config.dry_run, len(owed))))

    async def _run(self, settings: WorkerSettings | None) -> None:
        """Run what is owed, unless there is nothing (None), and publish, however that ended."""
        start = await self._record_start()
        started_s = time.monotonic()
        ticking = asyncio.create_task(self._tick())
        try:
            if settings is not None:
                done = sum(self.checkpoint.done)
                total = len(self.dataset) if self._drawn is None else done + len(self._drawn)
                self.progress.start(total, done)
                await engine_class(self.config.engine)(settings).run(self._owed_batches(), self)
        finally:
            ticking.cancel()
            self.progress.finish()
            start["duration_s"] = round(time.monotonic() - started_s, 3)
            await self._publish(start)
        if self._budget.stopped:
            pending = counted(self.statistics["samples"]["pending"], "prompt")
            said = f"{self._budget.stopped}; {pending} left pending: with a higher limit, --resume goes on"
            raise LimitReachedError(said)

    async def may_start(self, batch_number: int) -> bool:
        """Whether the run's limits let a prompt start."""
        return self._budget.may_start(batch_number)

    async def _tick(self) -> None:
        """Keep the bar's clock going, and say from time to time that a slow run is alive."""
        while True:
            await asyncio.sleep(TICK_S)
            self.progress.tick()

    def _owed_batches(self) -> Iterator[Batch]:
        batches = make_batches(
            self.dataset,
            self._owed() if self._drawn is None else self._drawn,
            batch_size=self._batch_size(),
            first_number=1 + self.scanned.highest_batch(self.folder.shards()),
            failures=self.scanned.done.attempts,
        )
        return takewhile(lambda _batch: not self._budget.stopped, batches)

    def _owed(self) -> Iterator[int]:
        """Indices of all samples that are not done."""
        return (index for index, is_done in enumerate(bytes(self.checkpoint.done)) if not is_done)

    def _batch_size(self) -> int:
        """As configured; a dry run's prompts are spread over the workers."""
        if self._drawn is None:
            return self.config.batch_size
        return max(1, min(self.config.batch_size, len(self._drawn) // self.config.num_workers))

    async def sample_finished(self, result: SampleResult) -> None:
        """Put a finished sample's row on disk; only then does it count. Cancelling does not stop what has begun."""
        recording = asyncio.ensure_future(self._record(result))
        try:
            await asyncio.shield(recording)
        except asyncio.CancelledError:
            await asyncio.wait([recording])
            if not recording.cancelled():
                recording.exception()  # the caller is leaving
            raise

    async def _record(self, result: SampleResult) -> None:
        await self.folder.append(result)
        summary = result.summary
        self._budget.ended(result.batch_number, summary)
        if self._drawn is not None:
            self._ran.append(summary)
        self.checkpoint.count(result.batch_number, summary.outcome)
        if OUTCOME_POLICY[summary.outcome].done:
            self.checkpoint.done[result.index] = 1
        self.progress.sample_finished(summary)
        self._finished += 1
        self._discarded += summary.outcome is Outcome.DISCARDED
        if self._finished == self._discarded == WARN_AFTER_DISCARDED:
            self.progress.note(
                f"The first {WARN_AFTER_DISCARDED} prompts were all discarded: this model returns no reasoning. "
                "--keep_no_reasoning keeps such rows, and with --resume brings back those discarded so far"
            )

    async def batch_finished(self, number: int) -> None:
        """Save the checkpoint, unless it has grown so large that saving each time would cost too much."""
        del number
        if self.checkpoint.is_due:
            await self._save_checkpoint()

    async def _save_checkpoint(self) -> None:
        started_s = time.monotonic()
        await self.folder.publish_json(self.folder.checkpoint, self.checkpoint.content(_now()))
        self.checkpoint.saved(time.monotonic() - started_s)

    def limit_changed(self, limit: int, refusals: int) -> None:
        """Show what the endpoint takes."""
        self.progress.limit_changed(limit, refusals)

    def turn(self, event: TurnEvent) -> None:
        """Show a line of `--verbose`."""
        self.progress.turn(event)

    async def _record_start(self) -> dict[str, Any]:
        """Write `run.json`: what the run is, and that it was started now."""
        former = self.folder.read_run_json()
        start: dict[str, Any] = {"started_at": _now(), "duration_s": 0.0, "version": __version__}
        self._run_json: dict[str, Any] = {
            "run_name": self.config.run_name,
            "created_at": former.get("created_at") or start["started_at"],
            "options": dict(self.config.options),
            "sandbox": self.settled.worker.sandbox,
            "toolsets": list(self.settled.worker.available_toolsets),
            "dataset": {
                "path": str(self.dataset.path),
                "sha256": self.dataset.fingerprint,
                "samples": len(self.dataset),
                "skipped": [{"line_number": line.line_number, "reason": line.reason} for line in self.dataset.skipped],
            },
            "starts": [*self._starts, start],
        }
        await self.folder.publish_json(self.folder.run_json, self._run_json)
        await self.folder.log_event("start", at=start["started_at"], samples=len(self.dataset))
        return start

    async def _publish(self, start: Mapping[str, Any]) -> None:
        """Checkpoint, merge, statistics: made whole from what is on disk."""
        await self._save_checkpoint()
        self.statistics = await asyncio.to_thread(publish, self.folder, self._run_json)
        await self.folder.publish_json(self.folder.run_json, self._run_json)
        await self.folder.log_event("end", at=_now(), duration_s=start["duration_s"])
        print_summary(self.statistics, str(self.folder.path))
        if self._ran:
            left = len(self.dataset) - sum(self.checkpoint.done)
            batches = -(-left // self.config.batch_size)
            parallel = max(1, min(self.config.num_workers, batches))
            print_lines(estimate_lines(self._ran, left, self._spent_before, parallel))
        if self.config.model.model == "local":
            self.progress.note(DEMONSTRATION_NOTE)


def _now() -> str:
    return datetime.now().isoformat(timespec="microseconds")
