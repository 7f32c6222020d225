"""What a run folder publishes, made from its rows and its `run.json` alone: the end of every run, and of `merge`.

A folder without `run.json` (shards of another program) is counted by its rows, and merged with the default filters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promptmill.dataset import Dataset, scan_dataset
from promptmill.errors import DatasetError
from promptmill.merge import MergeResult, MergeSources, count, merge
from promptmill.progress import byte_bar
from promptmill.resume import select
from promptmill.row_index import Judge, RowIndex
from promptmill.run_folder import RunFolder
from promptmill.statistics import RunFacts, statistics_json
from toolsets.catalog import TOOLS

Fates = Mapping[Path, bytes | bytearray]


def publish(folder: RunFolder, run_json: Mapping[str, Any], fates: Fates) -> dict[str, Any]:
    """Replace `trajectories.jsonl` and `statistics.json`; returns the latter's content. The folder must be open.

    Args:
        fates: What becomes of each row (see `fates_of`); empty when all count.

    Raises:
        StorageError: the disk refused; each of the two files is then the old one, whole.
    """
    with byte_bar("Merging", folder.row_bytes()) as advance:
        result = merge(_sources(folder, run_json, fates), folder.trajectories, advance=advance)
    statistics = _statistics(folder, run_json, result)
    folder.write_json(folder.statistics, statistics)
    return statistics


def recount(folder: RunFolder, run_json: Mapping[str, Any], fates: Fates) -> dict[str, Any]:
    """The content that `statistics.json` would have now. Writes nothing. Raises StorageError."""
    with byte_bar("Counting", folder.row_bytes()) as advance:
        result = count(_sources(folder, run_json, fates), advance=advance)
    return _statistics(folder, run_json, result)


def fates_of(folder: RunFolder, run_json: Mapping[str, Any]) -> tuple[Fates, bool]:
    """What becomes of each row, and whether the dataset was there to tell which rows are of its samples.

    The dataset must be the one that the run was last started with; without it, all rows count that no later attempt
    superseded.

    Raises:
        StorageError: a file cannot be read.
    """
    index = RowIndex(Judge(tuple(TOOLS), _keeps_no_reasoning(run_json)))
    with byte_bar("Reading finished rows", folder.row_bytes()) as advance:
        index.read(folder.row_files(), advance)
    dataset = _same_dataset(run_json)
    try:
        return select(dataset, index).fates_by_file(), dataset is not None
    finally:
        if dataset is not None:
            dataset.close()


def _same_dataset(run_json: Mapping[str, Any]) -> Dataset | None:
    """The dataset of the last start, unless it is gone or was changed since."""
    facts = _typed(run_json, "dataset", {})
    path = _typed(facts, "path", "")
    max_samples = _typed(run_json, "options", {}).get("max_samples")
    if not path:
        return None
    try:
        dataset = scan_dataset(Path(path), max_samples=max_samples if isinstance(max_samples, int) else None)
    except DatasetError:
        return None
    if dataset.fingerprint == facts.get("sha256"):
        return dataset
    dataset.close()
    return None


def _keeps_no_reasoning(run_json: Mapping[str, Any]) -> bool:
    return bool(_typed(_typed(run_json, "options", {}), "keep_no_reasoning", False))


def _sources(folder: RunFolder, run_json: Mapping[str, Any], fates: Fates) -> MergeSources:
    return MergeSources(
        shards=folder.shards(),
        discarded=folder.discarded,
        failed=folder.failed,
        known_tools=tuple(TOOLS),
        keep_no_reasoning=_keeps_no_reasoning(run_json),
        fates=fates,
    )


def _statistics(folder: RunFolder, run_json: Mapping[str, Any], result: MergeResult) -> dict[str, Any]:
    counted = result.statistics
    dataset = _typed(run_json, "dataset", {})
    facts = RunFacts(
        run_name=_typed(run_json, "run_name", folder.path.resolve().name),
        samples=max(_typed(dataset, "samples", 0), counted.done + counted.failed),
        not_selected=_typed(dataset, "not_selected", 0),
        invalid=_typed(dataset, "invalid", 0),
        starts=[start for start in _typed(run_json, "starts", []) if isinstance(start, dict)],
        unreadable_lines=result.unreadable_lines,
        uncounted_bytes=_typed(dataset, "uncounted_bytes", 0),
    )
    return statistics_json(counted, facts, result.tool_names)


def _typed(content: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of a file that a person may have edited, or that is not there."""
    value = content.get(key)
    return value if isinstance(value, type(default)) else default
