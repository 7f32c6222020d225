"""BatchRunner: from options to a start of the run. What a start does is in `start`."""

import asyncio
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from promptmill.changes import changed_settings
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
from promptmill.errors import ConfigError, RunStoppedError
from promptmill.flags import FLAG_BY_NAME
from promptmill.local_model import local_model_file
from promptmill.logs import masked_records
from promptmill.owed import Found
from promptmill.preflight import preflight
from promptmill.progress import Progress, byte_bar
from promptmill.retry import Retry
from promptmill.run_folder import RunFolder
from promptmill.secrets import mask_of
from promptmill.start import RunStart


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
        self._resume: bool = options_from(self._named())["resume"]
        self.statistics: Mapping[str, Any] = {}
        """The content of `statistics.json`, after `run`."""
        self.is_dry_run = False
        """Whether the last `run` was to leave prompts pending."""
        self.grace_s: float = options_from(self._named())["grace_s"]
        """How long the command lets prompts in flight finish, once it was told to stop."""
        self._start: RunStart | None = None
        self._is_stopping = False

    def _named(self) -> dict[str, Any]:
        """Options that somebody named: those of a configuration file, and over them those given here."""
        return (read_config_file(self._given["config"]) if self._given.get("config") else {}) | self._given

    def _decide(self, *, resume: bool) -> RunConfig:
        """Options in order of precedence; on resume, what nobody named is as the run was started."""
        named = self._named()
        own: Mapping[str, Any] = {}
        if resume and named.get("run_name"):
            folder = Path(str(named.get("output_dir") or options_from()["output_dir"])) / str(named["run_name"])
            own = _known_options(RunFolder(folder))
            if not named.get("dataset_file") and not RunFolder(folder).has_run():
                raise ConfigError(f"there is no run in {folder} to go on with; --dataset_file=FILE starts one")
            if not named.get("dataset_file") and not own:
                raise ConfigError(
                    f"{folder} has rows but no readable run.json, which would say how it was run: give its flags "
                    "again, --dataset_file=FILE and --model=NAME at least"
                )
        config = build_config(options_from(own, named), environment())
        if self._prefill:
            config = replace(config, agent=replace(config.agent, prefill_messages=self._prefill))
        return config

    async def run(self, resume: bool = False) -> None:
        """Run every sample that is owed, then merge. What it gives is the run folder.

        Cancelling ends and awaits all that is in flight; a row that is being written is written to its end. What is
        finished is then on disk, and a later `run(resume=True)` goes on.

        Args:
            resume: Go on with a run that exists, if it does (as the option `resume` says too). Without it, a run
                that exists is refused.

        Raises:
            UsageError: nothing was started.
            RunStoppedError: the run had to stop early; what is finished is on disk.
        """
        resume = resume or self._resume
        self._start, self._is_stopping = None, False
        config = self._decide(resume=resume)
        if not resume and (config.retry != Retry() or config.accept_changes):
            raise ConfigError("--retry and --accept_changes are for a run that exists; add --resume")
        if resume and config.start_over:
            raise ConfigError("--start_over contradicts --resume; give one of them")
        self.is_dry_run = config.dry_run is not None
        mask = mask_of(config.secrets)
        progress = Progress(mask=mask)
        dataset = await asyncio.to_thread(_scan, config)
        folder = RunFolder(config.run_dir, mask)
        try:
            settled = await asyncio.to_thread(preflight, config, dataset)
            self._check_folder(config, folder, resume=resume, progress=progress)
            if is_local_model(config.model.model):
                await local_model_file(config.model.model, environment(), progress.note)
            self._open(config, folder, progress)
            found = await asyncio.to_thread(Found, config, dataset, folder)
            self._start = start = RunStart(config, dataset, folder, progress, settled, found)
            if self._is_stopping:
                start.stop_starting()
            try:
                with masked_records(mask):
                    await start.go()
            finally:
                self.statistics = start.statistics
        except RunStoppedError as exc:
            if mask.text(trace := "".join(traceback.format_exception(exc))) == trace:
                raise
            raise type(exc)(mask.text(str(exc))) from None
        finally:
            folder.close()
            dataset.close()

    def stop_starting(self) -> int:
        """Let no further prompt start: `run` ends, without an error, when those in flight have ended.

        Returns:
            How many are in flight.
        """
        self._is_stopping = True
        return self._start.stop_starting() if self._start is not None else 0

    def _check_folder(self, config: RunConfig, folder: RunFolder, *, resume: bool, progress: Progress) -> None:
        try:
            has_run = folder.has_run()
        except OSError as exc:
            raise ConfigError(f"{folder.path}: cannot look into the run folder ({exc.strerror})") from exc
        if has_run and not resume and not config.start_over:
            raise ConfigError(
                f"{folder.path} already holds a run: add --resume to go on with it, --start_over to move it aside and "
                "begin anew, or choose another --run_name"
            )
        if resume and not has_run:
            progress.note(f"There is no run in {folder.path} to go on with: it starts now")
        changes = changed_settings(folder.read_run_json(), config) if resume else []
        if changes and not config.accept_changes:
            raise ConfigError(
                f"{folder.path} was last run with other settings: {'; '.join(changes)}. Leave them out to go on as "
                f"before, or add --accept_changes: each row says what made it{self._another_file(folder)}"
            )
        for change in changes:
            progress.note(f"Changed since the run was started, and accepted: {change}")

    def _another_file(self, folder: RunFolder) -> str:
        """A hint for who accepts changes of settings: the dataset is another file too."""
        former = folder.own_options().get("dataset_file")
        given = self._named().get("dataset_file")
        return f" (--dataset_file={given} is another too: it was {former})" if given and former != given else ""

    def _open(self, config: RunConfig, folder: RunFolder, progress: Progress) -> None:
        if config.start_over and folder.has_run():
            progress.note(f"The former run is now in {folder.move_aside()}")
        folder.open()
        if folder.left_by:
            progress.note(f"The last start ({folder.left_by}) did not end by itself; every row that it saved is whole")


def _known_options(folder: RunFolder) -> dict[str, Any]:
    """The run's own options, but where it lies: a folder that was moved or copied goes on where it is now."""
    known = FLAG_BY_NAME.keys() - {"output_dir", "run_name"}
    own = {name: value for name, value in folder.own_options().items() if name in known}
    try:
        options_from(own)
    except ConfigError as exc:
        raise ConfigError(f"{folder.run_json}: {exc}") from exc
    return own


def _scan(config: RunConfig) -> Dataset:
    try:
        size = config.dataset_file.stat().st_size
    except OSError:
        size = 0  # the scan says what is wrong with it
    with byte_bar("Reading the dataset", size) as advance:
        return scan_dataset(config.dataset_file, max_samples=config.max_samples, advance=advance)
