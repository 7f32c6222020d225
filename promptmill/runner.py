"""BatchRunner: dataset -> owed -> engine -> run folder. Knows the order of things, and nothing else."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from promptmill import __version__
from promptmill.batches import make_batches
from promptmill.checkpoint import Checkpoint
from promptmill.config import (
    RunConfig,
    build_config,
    environment,
    is_local_model,
    options_from,
    prefill_from,
    read_config_file,
    reasoning_options,
)
from promptmill.dataset import Dataset, scan_dataset
from promptmill.engines import engine_class
from promptmill.errors import OUTCOME_POLICY, ConfigError, Outcome
from promptmill.local_model import local_model_server
from promptmill.merge import decoded_row
from promptmill.preflight import Preflight, preflight
from promptmill.progress import Progress, byte_bar
from promptmill.publish import publish
from promptmill.records import RowSummary, SampleResult, TurnEvent
from promptmill.resume import DoneRows, match_done
from promptmill.rows import summarise
from promptmill.run_folder import RunFolder
from promptmill.shards import read_lines
from promptmill.summary import print_summary

WARN_AFTER_DISCARDED = 20


class BatchRunner:
    """Runs a dataset of prompts through agents and writes a run folder.

    Args:
        dataset_file: JSONL file, one object with a `prompt` a line.
        batch_size: Prompts per batch (10 when None); a batch's prompts run one after another.
        run_name: Names the run folder under `output_dir`.
        max_iterations: Most model calls per prompt; the flag's name is `max_turns`.
        reasoning_config: `{"enabled": bool, "effort": str}`.
        prefill_messages: Messages sent after the system prompt on every request, never saved.
        engine: `inline` runs in the caller's event loop and needs no main guard; `processes` needs one.
        **options: Any further flag of `batch_runner.py` by its name; None means its default.

    Raises:
        ConfigError: an option is unknown or refused. Nothing was made.
    """

    def __init__(
        self,
        dataset_file: str | Path = "",
        batch_size: int | None = None,
        run_name: str = "",
        *,
        max_iterations: int | None = None,
        reasoning_config: Mapping[str, Any] | None = None,
        prefill_messages: Iterable[Mapping[str, str]] | None = None,
        engine: str | None = "inline",
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {
            "dataset_file": str(dataset_file) or None,
            "batch_size": batch_size,
            "run_name": run_name or None,
        }
        given |= {"engine": engine, **options, **reasoning_options(reasoning_config)}
        if max_iterations is not None:
            given["max_turns"] = max_iterations
        self._given = {name: value for name, value in given.items() if value is not None}
        self._prefill = prefill_from(prefill_messages or (), where="prefill_messages")
        options_from(self._named())
        self.statistics: Mapping[str, Any] = {}
        """The content of `statistics.json`, after `run`."""

    def _named(self) -> dict[str, Any]:
        """Options that somebody named: those of a configuration file, and over them those given here."""
        return (read_config_file(self._given["config"]) if self._given.get("config") else {}) | self._given

    def _decide(self, *, resume: bool) -> RunConfig:
        """Options in order of precedence; on resume, what nobody named is as the run was started."""
        named = self._named()
        own: Mapping[str, Any] = {}
        if resume and named.get("run_name"):
            folder = Path(str(named.get("output_dir") or options_from()["output_dir"])) / str(named["run_name"])
            own = RunFolder(folder).read_run_json().get("options") or {}
        config = build_config(options_from(own, named), environment())
        if self._prefill:
            config = replace(config, agent=replace(config.agent, prefill_messages=self._prefill))
        return config

    async def run(self, resume: bool = False) -> None:
        """Run every sample that is owed, then merge. What it gives is the run folder.

        Cancelling ends and awaits all that is in flight; a row that is being written is written to its end. What is
        finished is then on disk, and a later `run(resume=True)` goes on.

        Args:
            resume: Go on with a run that exists, if it does. Without it, a run that exists is refused.

        Raises:
            UsageError: nothing was started.
            RunStoppedError: the run had to stop early; what is finished is on disk.
        """
        config = self._decide(resume=resume)
        progress = Progress()
        dataset = await asyncio.to_thread(_scan, config)
        folder = RunFolder(config.run_dir)
        try:
            settled = preflight(config, dataset)
            self._check_folder(folder, resume=resume, progress=progress)
            folder.open()
            run = _Run(config, dataset, folder, progress, settled)
            await run.go()
            self.statistics = run.statistics
        finally:
            folder.close()
            dataset.close()

    def _check_folder(self, folder: RunFolder, *, resume: bool, progress: Progress) -> None:
        if folder.has_run() and not resume:
            raise ConfigError(
                f"{folder.path} already holds a run: add --resume to go on with it, or choose another --run_name"
            )
        if resume and not folder.has_run():
            progress.note(f"There is no run in {folder.path} to go on with: it starts now")


def _scan(config: RunConfig) -> Dataset:
    size = config.dataset_file.stat().st_size if config.dataset_file.is_file() else 0
    with byte_bar("Reading the dataset", size) as advance:
        return scan_dataset(config.dataset_file, max_samples=config.max_samples, advance=advance)


class _Run:
    """One start of a run, between the opening and the closing of its folder. Takes what workers finish."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, folder: RunFolder, progress: Progress, settled: Preflight
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.folder = folder
        self.progress = progress
        self.settled = settled
        self.done_rows = DoneRows()
        self.checkpoint = Checkpoint(config.run_name, bytearray(len(dataset)))
        self.statistics: Mapping[str, Any] = {}
        self._finished = self._discarded = 0

    async def go(self) -> None:
        """Everything from the resume scan to the printed summary."""
        for note in self.settled.notes:
            self.progress.note(note)
        first_number = await asyncio.to_thread(self._scan_rows)
        self.checkpoint.done = await asyncio.to_thread(match_done, self.dataset, self.done_rows)
        before = sum(self.checkpoint.done)
        if before:
            self.progress.note(f"Resuming: {before:,} of {len(self.dataset):,} prompts are done")
        start = await self._record_start()
        started_s = time.monotonic()
        try:
            await self._run_owed(first_number, before)
        finally:
            self.progress.finish()
            start["duration_s"] = round(time.monotonic() - started_s, 3)
            await self._publish(start)

    def _scan_rows(self) -> int:
        """Read the rows that are there; returns the number of the first new batch."""
        highest = -1
        files = self.folder.row_files()
        with byte_bar("Reading finished rows", sum(path.stat().st_size for path in files)) as advance:
            for path in files:
                for line in read_lines(path):
                    advance(len(line) + 1)
                    row = decoded_row(line)
                    if row is not None:
                        summary = summarise(row)
                        highest = max(highest, summary.batch_number)
                        self._recall(summary)
        shard_numbers = [int(path.stem.removeprefix("batch_")) for path in self.folder.shards()]
        return max([highest, *shard_numbers]) + 1

    def _recall(self, summary: RowSummary) -> None:
        self.checkpoint.count(summary.batch_number, summary.outcome)
        if OUTCOME_POLICY[summary.outcome].done:
            self.done_rows.add_done(summary)
        else:
            self.done_rows.add_failed(summary)

    async def _run_owed(self, first_number: int, before: int) -> None:
        owed = (index for index, is_done in enumerate(bytes(self.checkpoint.done)) if not is_done)
        batches = make_batches(
            self.dataset,
            owed,
            batch_size=self.config.batch_size,
            first_number=first_number,
            failures=self.done_rows.attempts,
        )
        if before == len(self.dataset):
            return
        async with AsyncExitStack() as stack:
            settings = self.settled.worker
            if is_local_model(self.config.model.model):
                server = local_model_server(
                    self.config.model.model,
                    parallel=self.config.num_workers,
                    environ=environment(),
                    note=self.progress.note,
                )
                endpoint = await stack.enter_async_context(server)
                model = replace(self.config.model, endpoint=endpoint)
                settings = replace(settings, config=replace(self.config, model=model))
            self.progress.start(len(self.dataset), before)
            await engine_class(self.config.engine)(settings).run(batches, self)

    async def sample_finished(self, result: SampleResult) -> None:
        """Put a finished sample's row on disk; only then does it count."""
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


def _now() -> str:
    return datetime.now().isoformat(timespec="microseconds")
