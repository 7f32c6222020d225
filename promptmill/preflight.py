"""What is settled before anything is made or called: where tools run, which tools there are, what to warn about."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from promptmill.config import RunConfig, WorkerSettings
from promptmill.dataset import Dataset
from promptmill.engines import engine_class
from promptmill.errors import ConfigError
from promptmill.quirks import quirks_for
from promptmill.retry import Retry
from promptmill.wording import counted
from toolsets.base import ToolsetError
from toolsets.catalog import unavailable
from toolsets.distributions import DISTRIBUTIONS, usable_toolsets
from toolsets.sandboxes import choose, sandbox_class
from toolsets.sandboxes.base import SandboxError
from toolsets.sandboxes.supervised import sweep_abandoned

SHOWN_SKIPPED_LINES = 10


@dataclass(frozen=True, slots=True)
class Preflight:
    """The decisions, and the lines that tell them."""

    worker: WorkerSettings
    notes: tuple[str, ...]


def preflight(config: RunConfig, dataset: Dataset) -> Preflight:
    """Settle a run.

    Raises:
        ConfigError: an unknown engine, sandbox or distribution, or one that cannot work here; or prompts to run again
            that are not there.
    """
    engine_class(config.engine)
    try:
        tempfile.gettempdir()
    except OSError as exc:
        raise ConfigError(
            f"there is no temporary folder that can be written ({exc}); make room, or set TMPDIR"
        ) from exc
    check_retry(config.retry, dataset)
    sweep_abandoned()
    try:
        sandbox, sandbox_note = choose(config.sandbox)
    except (ValueError, SandboxError) as exc:
        raise ConfigError(f"--sandbox={config.sandbox}: {exc}") from exc
    missing, available = settle_toolsets(config.distribution)
    notes = [
        *skipped_notes(dataset),
        batches_note(config, len(dataset)),
        sandbox_note,
        *cwd_notes(dataset, sandbox),
        *toolsets_notes(missing),
        *reasoning_notes(config),
        *(note for quirk in quirks_for(config.model) for note in quirk.notes()),
    ]
    settings = WorkerSettings(config, sandbox, available, conversations=config.num_workers)
    return Preflight(settings, tuple(notes))


def check_retry(retry: Retry, dataset: Dataset) -> None:
    """Raises ConfigError where prompts are to be run again that the dataset does not have."""
    if retry.indices and (highest := max(retry.indices)) >= len(dataset):
        raise ConfigError(
            f"--retry={retry.typed}: there is no prompt {highest}; the dataset has {len(dataset):,}, from 0"
        )


def settle_toolsets(distribution: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """A distribution's toolsets that cannot be used here, with the reasons, and those that can.

    Raises:
        ConfigError: there is no such distribution, or nothing of it can be used.
    """
    try:
        available = usable_toolsets(distribution)
    except ToolsetError as exc:
        raise ConfigError(f"--distribution={distribution}: {exc}") from exc
    return unavailable(DISTRIBUTIONS[distribution].percent_by_toolset), available


def skipped_notes(dataset: Dataset) -> list[str]:
    """The dataset's lines that are no samples: how many, and the first ten."""
    skipped = dataset.skipped
    if not skipped:
        return []
    notes = [f"Skipped {counted(len(skipped), 'line')} of {dataset.path}:"]
    notes += [f"  line {line.line_number}: {line.reason}" for line in skipped[:SHOWN_SKIPPED_LINES]]
    if len(skipped) > SHOWN_SKIPPED_LINES:
        notes.append(f"  … and {len(skipped) - SHOWN_SKIPPED_LINES} more, all listed in run.json")
    return notes


def cwd_notes(dataset: Dataset, sandbox: str) -> list[str]:
    """Working folders that look like the host's and are not there: in an isolating sandbox they start empty."""
    if not sandbox_class(sandbox).isolates:
        return []
    missing = {cwd: line for cwd, line in dataset.first_line_by_cwd.items() if cwd[0] == "/" and not Path(cwd).is_dir()}
    if not missing:
        return []
    cwd, line = next(iter(missing.items()))
    others = f" (and {counted(len(missing) - 1, 'other')})" if len(missing) > 1 else ""
    return [f"cwd {cwd!r} of line {line}{others} is no folder of this machine: it is made inside, and starts empty"]


def batches_note(config: RunConfig, samples: int) -> str:
    """How the run is cut up, and what to change when workers would stand idle."""
    batches = -(-samples // config.batch_size)
    said = "" if config.batch_size_given else " (the default; --batch_size changes it)"
    note = (
        f"{counted(samples, 'prompt')} in {counted(batches, 'batch', 'batches')} of {config.batch_size}{said}, "
        f"{config.num_workers} in flight at once, model {config.model.model}"
    )
    if batches < config.num_workers and samples > batches:
        fill = max(1, samples // config.num_workers)
        note += f"\nFewer batches than workers: --batch_size={fill} would keep more of them busy"
    return note


def toolsets_notes(missing: Mapping[str, str]) -> list[str]:
    """Toolsets of the distribution that are left out, by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        names_by_reason.setdefault(reason, []).append(name)
    return [f"Toolsets left out: {', '.join(names)} ({reason})" for reason, names in names_by_reason.items()]


def reasoning_notes(config: RunConfig) -> list[str]:
    """Warn when rows without reasoning are to be expected and would be discarded."""
    if config.keep_no_reasoning or not config.model.reasoning.is_off or config.model.model == "local":
        return []
    return [
        "Reasoning is switched off, and rows without any reasoning are discarded: give --keep_no_reasoning to keep them"
    ]
