"""What a start of a run finds in its folder, and what it therefore owes."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from promptmill.budget import settled_starts
from promptmill.config import RunConfig
from promptmill.dataset import Dataset
from promptmill.errors import ConfigError
from promptmill.prices import Prices
from promptmill.progress import byte_bar
from promptmill.resume import Selection, Totals, select
from promptmill.retry import Retry, read_retry
from promptmill.row_index import Judge, Kind, RowIndex
from promptmill.run_folder import RunFolder
from promptmill.wording import counted
from toolsets.catalog import TOOLS


class Found:
    """The rows of a run folder, matched with the dataset."""

    def __init__(self, config: RunConfig, dataset: Dataset, folder: RunFolder) -> None:
        """Read every row. Raises StorageError, or ConfigError where the rows are those of another dataset."""
        self._folder = folder
        self._dataset = dataset
        starts = folder.read_run_json().get("starts")
        self._index = RowIndex(Judge(tuple(TOOLS), config.keep_no_reasoning), _begun_at(starts, config.retry))
        self.totals = Totals(price=Prices(config.model).priced)
        with byte_bar("Reading finished rows", folder.row_bytes()) as advance:
            self._index.read(folder.row_files(), advance, self.totals.add)
        self.selection: Selection = select(dataset, self._index)
        self.starts: Sequence[Mapping[str, Any]] = settled_starts(starts, self.totals.spent.latest)
        """Former starts."""
        self.had_rows = len(self._index) > 0
        """Whether there was any row when this start began."""
        self.is_another_dataset = bool(self.selection.not_in_dataset()) and not self.selection.counting()
        """Whether not one row is of a sample of the dataset."""
        if self.is_another_dataset and not config.accept_changes:
            rows = counted(len(self._index), "row")
            raise ConfigError(
                f"{folder.path} holds {rows}, and none is of a prompt of {dataset.path}: it is the run of another "
                "dataset. Take another --run_name, or --accept_changes to go on with this one"
            )
        self.run_again = 0
        """How many of the samples to run are done."""
        self.owed: array[int] = self._choose(config.retry)
        """Indices of the samples to run, in the dataset's order."""

    def _choose(self, retry: Retry) -> "array[int]":
        chosen = {Kind[word.upper()] for word in retry.kinds}
        owed: array[int] = array("q")
        for sample in range(len(self._dataset)):
            kind = self.selection.kind(sample)
            if kind is None or (
                (kind in chosen or retry.names(sample, self._dataset.content_hash(sample)))
                and (kind is Kind.FAILED or not self.selection.is_recent(sample))
            ):
                owed.append(sample)
                self.run_again += kind is not None and kind is not Kind.FAILED
        return owed

    def attempts_before(self, sample: int) -> int:
        """How often a sample was tried before."""
        return self.selection.attempts_before(sample, self._dataset.key(sample))

    def fates_now(self) -> Mapping[Path, bytearray]:
        """What becomes of each row in the merge, those included that were made since; empty when all count.

        Raises:
            StorageError: a file cannot be read.
        """
        if not self.had_rows:
            return {}
        with byte_bar("Reading new rows", self._folder.row_bytes()) as advance:
            self._index.read(self._folder.row_files(), advance)
        if len(self._index) > len(self.selection.fates):
            return select(self._dataset, self._index).fates_by_file()
        return self.selection.fates_by_file()


def _is_same(retry: Retry, typed: object) -> bool:
    try:
        return replace(read_retry(str(typed)), typed="") == replace(retry, typed="")
    except ConfigError:
        return False


def _begun_at(starts: object, retry: Retry) -> str:
    """When a choice of samples to run again was begun that has not been run to its end; empty when there is none.

    What was run again since then is not run a third time when the interrupted command is typed once more.
    """
    begun_at = ""
    for start in reversed(starts if isinstance(starts, list) else []):
        if not isinstance(start, dict) or start.get("complete") or not _is_same(retry, start.get("retry")):
            break
        begun_at = str(start.get("started_at") or "")
    return begun_at
