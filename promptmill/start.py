"""One start of a run, between the opening and the closing of its folder: from the resume scan to the summary."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from promptmill import __version__
from promptmill.batches import make_batches
from promptmill.checkpoint import Checkpoint
from promptmill.config import RunConfig, WorkerSettings, environment
from promptmill.dataset import Dataset
from promptmill.engines import engine_class
from promptmill.errors import OUTCOME_POLICY, Outcome
from promptmill.local_model import served
from promptmill.preflight import Preflight
from promptmill.progress import Progress, byte_bar
from promptmill.publish import publish
from promptmill.records import Batch, SampleResult, TurnEvent
from promptmill.resume import ScannedRows, match_done, scan_rows
from promptmill.run_folder import RunFolder
from promptmill.summary import print_summary

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

    async def go(self) -> None:
        """Everything from the resume scan to the printed summary."""
        for note in self.settled.notes:
            self.progress.note(note)
        await asyncio.to_thread(self._scan)
        before = sum(self.checkpoint.done)
        if before:
            self.progress.note(f"Resuming: {before:,} of {len(self.dataset):,} prompts are done")
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

    async def _run(self, settings: WorkerSettings | None) -> None:
        """Run what is owed, unless there is nothing (None), and publish, however that ended."""
        start = await self._record_start()
        started_s = time.monotonic()
        ticking = asyncio.create_task(self._tick())
        try:
            if settings is not None:
                self.progress.start(len(self.dataset), sum(self.checkpoint.done))
                await engine_class(self.config.engine)(settings).run(self._owed_batches(), self)
        finally:
            ticking.cancel()
            self.progress.finish()
            start["duration_s"] = round(time.monotonic() - started_s, 3)
            await self._publish(start)

    async def _tick(self) -> None:
        """Keep the bar's clock going, and say from time to time that a slow run is alive."""
        while True:
            await asyncio.sleep(TICK_S)
            self.progress.tick()

    def _owed_batches(self) -> Iterator[Batch]:
        return make_batches(
            self.dataset,
            (index for index, is_done in enumerate(bytes(self.checkpoint.done)) if not is_done),
            batch_size=self.config.batch_size,
            first_number=1 + self.scanned.highest_batch(self.folder.shards()),
            failures=self.scanned.done.attempts,
        )

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
            "starts": [*former.get("starts", []), start],
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
        if self.config.model.model == "local":
            self.progress.note(DEMONSTRATION_NOTE)


def _now() -> str:
    return datetime.now().isoformat(timespec="microseconds")
