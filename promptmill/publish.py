"""What a run folder publishes, made from its rows and its `run.json` alone: the end of every run, and of `merge`.

A folder without `run.json` (shards of another program) is counted by its rows, and merged with the default filters.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from promptmill.merge import MergeResult, MergeSources, count, merge
from promptmill.progress import byte_bar
from promptmill.run_folder import RunFolder
from promptmill.statistics import RunFacts, statistics_json
from toolsets.catalog import TOOLS


def publish(folder: RunFolder, run_json: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `trajectories.jsonl` and `statistics.json`; returns the latter's content. The folder must be open.

    Raises:
        StorageError: the disk refused; each of the two files is then the old one, whole.
    """
    with _bar(folder, "Merging") as advance:
        result = merge(_sources(folder, run_json), folder.trajectories, advance=advance)
    statistics = _statistics(folder, run_json, result)
    folder.write_json(folder.statistics, statistics)
    return statistics


def recount(folder: RunFolder, run_json: Mapping[str, Any]) -> dict[str, Any]:
    """The content that `statistics.json` would have now. Writes nothing. Raises StorageError."""
    with _bar(folder, "Counting") as advance:
        result = count(_sources(folder, run_json), advance=advance)
    return _statistics(folder, run_json, result)


def _bar(folder: RunFolder, description: str) -> AbstractContextManager[Callable[[int], None]]:
    return byte_bar(description, sum(path.stat().st_size for path in folder.row_files()))


def _sources(folder: RunFolder, run_json: Mapping[str, Any]) -> MergeSources:
    return MergeSources(
        shards=folder.shards(),
        discarded=folder.discarded,
        failed=folder.failed,
        known_tools=tuple(TOOLS),
        keep_no_reasoning=_typed(_typed(run_json, "options", {}), "keep_no_reasoning", False),
    )


def _statistics(folder: RunFolder, run_json: Mapping[str, Any], result: MergeResult) -> dict[str, Any]:
    counted = result.statistics
    dataset = _typed(run_json, "dataset", {})
    facts = RunFacts(
        run_name=_typed(run_json, "run_name", folder.path.resolve().name),
        samples=_typed(dataset, "samples", counted.done + counted.failed),
        skipped_lines=len(_typed(dataset, "skipped", [])),
        starts=_typed(run_json, "starts", []),
        unreadable_lines=result.unreadable_lines,
    )
    return statistics_json(counted, facts, result.tool_names)


def _typed(content: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of a file that a person may have edited, or that is not there."""
    value = content.get(key)
    return value if isinstance(value, type(default)) else default
