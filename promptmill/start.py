"""One start of a run, in its open folder: run what is owed, publish, and say what came of it."""

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
from promptmill.budget import Budget, duration_of
from promptmill.changes import prefill_digest
from promptmill.checkpoint import Checkpoint
from promptmill.config import RunConfig, WorkerSettings, environment
from promptmill.dataset import Dataset
from promptmill.engines import engine_class
from promptmill.errors import OUTCOME_POLICY, LimitReachedError, Outcome, RunStoppedError, StorageError
from promptmill.estimate import estimate_lines
from promptmill.event_loop import to_its_end
from promptmill.local_model import served
from promptmill.owed import Found
from promptmill.preflight import Preflight
from promptmill.progress import Progress
from promptmill.publish import publish
from promptmill.records import Batch, RowSummary, SampleResult, TurnEvent
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
    """Runs what is owed and publishes what is there. Takes what engines and workers tell (`RunEvents`)."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        folder: RunFolder,
        progress: Progress,
        settled: Preflight,
        found: Found,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.folder = folder
        self.progress = progress
        self.settled = settled
        self.found = found
        self.checkpoint = Checkpoint(config.run_name, found.selection.done())
        self.statistics: Mapping[str, Any] = {}
        """The content of `statistics.json`, after `go`."""
        self._finished = self._discarded = 0
        self._budget = Budget(config.limits, found.totals.spent, duration_of(found.starts))
        self._spent_before = replace(found.totals.spent)  # a copy: the budget goes on counting in that very record
        self._drawn: Sequence[int] | None = None
        """Indices of the samples that a dry run runs; None for all that are owed."""
        self._ran: list[RowSummary] = []
        """What a dry run has run."""
        self._has_told_refusal = False
        self._is_stopping = False
        """Whether no further prompt is to start."""
        self._refusal: RunStoppedError | None = None
        """The disk's first refusal, or what kept the end from being published."""
        for (batch_number, outcome), samples in found.totals.endings.items():
            self.checkpoint.count(batch_number, outcome, samples)
        if config.dry_run is not None:
            rng = random.Random(f"dry_run:{config.seed}")
            self._drawn = sorted(rng.sample(found.owed, min(config.dry_run, len(found.owed))))

    async def go(self) -> None:
        """Everything up to the printed summary."""
        for note in self.settled.notes:
            self.progress.note(note)
        done = sum(self.checkpoint.done)
        if self.found.had_rows:
            again = self.found.run_again
            self.progress.note(
                f"Resuming: {done:,} of {counted(len(self.dataset), 'prompt')} are done"
                + (f", {again:,} of them are run again" if again > 0 else "")
            )
        if self.found.is_another_dataset:
            self.progress.note(f"Accepted: no row of before is of a prompt of {self.dataset.path}; they stay unmerged")
        if self.config.limits.are_set and self.found.starts:
            self.progress.note(f"Former starts spent {self._budget.spent_so_far()}")
        if not self.found.owed or self._is_stopping:
            await self._run(None)
            return
        async with served(
            self.config.model, parallel=self.config.num_workers, environ=environment(), note=self.progress.note
        ) as model:
            await self._run(self.settled.worker.with_model(model))

    def stop_starting(self) -> int:
        """Let no further prompt start; returns how many are in flight."""
        self._is_stopping = True
        self.progress.stopping(self.config.grace_s)
        return self._budget.in_flight

    async def _run(self, settings: WorkerSettings | None) -> None:
        """Run what is owed, unless there is nothing (None), and publish, however that ended."""
        start = await self._record_start()
        try:
            await self._work(settings, start)
        except BaseException as exc:  # whatever ends it, what is finished is published, and then it goes on its way
            await self._publish_after(exc, start)
            raise
        await self._publish_after(None, start)
        if self._budget.stopped:
            pending = counted(self.statistics["samples"]["pending"], "prompt")
            said = f"{self._budget.stopped}; {pending} left pending: {self._budget.advice}"
            raise LimitReachedError(said)

    async def _work(self, settings: WorkerSettings | None, start: dict[str, Any]) -> None:
        """Have the engine run what is owed, and note how long it took."""
        started_s = time.monotonic()
        ticking = asyncio.create_task(self._tick())
        try:
            if settings is not None:
                settled = len(self.dataset) - len(self.found.owed)
                total = len(self.dataset) if self._drawn is None else settled + len(self._drawn)
                self.progress.start(total, settled)
                await engine_class(self.config.engine)(settings).run(self._owed_batches(), self)
        finally:
            ticking.cancel()
            self.progress.finish()
            start["duration_s"] = round(time.monotonic() - started_s, 3)
            start["complete"] = self._finished == len(self.found.owed)

    def _ended_by(self, failure: BaseException | None) -> str:
        """Why this start ended, for `run.json` and `run.log`."""
        if isinstance(failure, asyncio.CancelledError):
            return "interrupted"
        if failure is not None:
            return str(failure) or type(failure).__name__
        if self._budget.stopped:
            return self._budget.stopped
        return "interrupted" if self._is_stopping else "nothing is left to start"

    async def _publish_after(self, failure: BaseException | None, start: dict[str, Any]) -> None:
        """Publish, whatever has ended the run. Raises what is to be told instead: the disk's first refusal of all."""
        if isinstance(failure, StorageError):
            self._refusal = self._refusal or failure
        start["ended"] = self._ended_by(failure)
        try:
            await to_its_end(self._publish(start))
        except RunStoppedError as exc:
            self._refusal = self._refusal or exc
        except asyncio.CancelledError:
            if failure is None:
                raise
        has_reason = failure is not None and not isinstance(failure, StorageError | asyncio.CancelledError)
        if self._refusal is not None and not has_reason:
            raise self._refusal

    def may_start(self, batch_number: int) -> bool:
        """Whether a batch's next prompt may start."""
        if self._is_stopping:
            self._budget.let_go(batch_number)
            return False
        return self._budget.may_start(batch_number)

    def note(self, line: str) -> None:
        """Show a line."""
        self.progress.note(line)

    async def _tick(self) -> None:
        """Keep the bar's clock going, and say from time to time that a slow run is alive."""
        while True:
            await asyncio.sleep(TICK_S)
            self.progress.tick()

    def _owed_batches(self) -> Iterator[Batch]:
        batches = make_batches(
            self.dataset,
            self.found.owed if self._drawn is None else self._drawn,
            batch_size=self._batch_size(),
            first_number=1 + self.found.totals.highest_batch(self.folder.batch_numbers()),
            attempts_before=self.found.attempts_before,
        )
        return takewhile(lambda _batch: not self._budget.stopped, batches)

    def _batch_size(self) -> int:
        """As configured; a dry run's prompts are spread over the workers."""
        if self._drawn is None:
            return self.config.batch_size
        return max(1, min(self.config.batch_size, len(self._drawn) // self.config.num_workers))

    async def sample_finished(self, result: SampleResult) -> bool:
        """Put a finished sample's row on disk; only then does it count. Cancelling does not stop what has begun."""
        await to_its_end(self._record_or_remember(result))
        return result.has_next and self.may_start(result.batch_number)

    async def _record_or_remember(self, result: SampleResult) -> None:
        """Record; a refusal is kept, for whoever waits for it may be cancelled before it comes."""
        try:
            await self._record(result)
        except StorageError as exc:
            self._refusal = self._refusal or exc
            raise

    async def _record(self, result: SampleResult) -> None:
        await self.folder.append(result)
        summary = result.summary
        self._budget.ended(result.batch_number, summary)
        if summary.outcome is Outcome.INTERRUPTED:
            return
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

    def limit_changed(self, limit: int, refusals: int, said: str) -> None:
        """Show what the endpoint takes, and what it said when it first refused."""
        if said and not self._has_told_refusal:
            self._has_told_refusal = True
            self.progress.note(f"{said} (waiting until it takes requests again, with fewer at once)")
        self.progress.limit_changed(limit, refusals)

    def turn(self, event: TurnEvent) -> None:
        """Show a line of `--verbose`."""
        self.progress.turn(event)

    async def _record_start(self) -> dict[str, Any]:
        """Write `run.json`: what the run is, and that it was started now."""
        former = self.folder.read_run_json()
        start: dict[str, Any] = {
            "started_at": _now(),
            "duration_s": 0.0,
            "version": __version__,
            "retry": self.config.retry.typed,
            "complete": False,
            "ended": "",
        }
        self._run_json: dict[str, Any] = {
            "run_name": self.config.run_name,
            "created_at": former.get("created_at") or start["started_at"],
            "options": dict(self.config.options),
            "prefill_sha256": prefill_digest(self.config.agent.prefill_messages),
            "sandbox": self.settled.worker.sandbox,
            "toolsets": list(self.settled.worker.available_toolsets),
            "dataset": {
                "path": str(self.dataset.path),
                "sha256": self.dataset.fingerprint,
                "samples": len(self.dataset),
                "not_selected": self.dataset.not_selected,
                "uncounted_bytes": self.dataset.uncounted_bytes,
                "invalid": self.dataset.invalid,
                "skipped": [{"line_number": line.line_number, "reason": line.reason} for line in self.dataset.skipped],
            },
            "starts": [*self.found.starts, start],
        }
        await self.folder.publish_json(self.folder.run_json, self._run_json)
        await self.folder.log_event("start", at=start["started_at"], samples=len(self.dataset))
        return start

    def _merged(self) -> Mapping[str, Any]:
        """Replace the merged rows and the statistics."""
        return publish(self.folder, self._run_json, self.found.fates_now())

    async def _publish(self, start: Mapping[str, Any]) -> None:
        """Checkpoint, merge, statistics: made whole from what is on disk."""
        await self._save_checkpoint()
        self.statistics = await self.folder.on_writer(self._merged)
        await self.folder.publish_json(self.folder.run_json, self._run_json)
        await self.folder.log_event("end", at=_now(), duration_s=start["duration_s"], reason=start["ended"])
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
