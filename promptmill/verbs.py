"""What can be done with the folder of a run that exists. Registry: verb -> function and flags.

A verb only reads the folder, unless it says otherwise; one that replaces the run's own files takes the run's lock.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from promptmill.door import print_answer
from promptmill.errors import ConfigError
from promptmill.escaping import escaped
from promptmill.exports import EXPORTS, ExportFunction, load_export
from promptmill.flags import Flag, did_you_mean, one_of, text
from promptmill.publish import Fates, fates_of, publish, recount
from promptmill.rows import decoded_row
from promptmill.run_folder import RunFolder
from promptmill.shards import has_torn_end, read_lines, write_atomic
from promptmill.summary import print_summary


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing to do with a run folder."""

    run: Callable[[RunFolder, Mapping[str, Any]], None]
    """Takes the folder and the parsed flags, prints what it did; raises UsageError or RunStoppedError."""
    summary: str
    flags: tuple[Flag, ...] = ()
    usage: str = ""
    """What `--help` shows after the run folder."""


def export(folder: RunFolder, options: Mapping[str, Any]) -> None:
    """Write the merged rows in a format."""
    name = options["format"]
    if not name:
        raise ConfigError(f"--format is required; known: {', '.join(EXPORTS)}")
    if not folder.trajectories.exists():
        raise ConfigError(
            f"{folder.trajectories} is not there yet: it is made when a run ends, or by "
            f"`python -m promptmill merge {folder.path}`"
        )
    target = _export_target(folder, name, options["output"])
    _note_newer_rows(folder)
    counts = ExportCounts()
    write_atomic(target, exported_lines(folder.trajectories, load_export(name), counts))
    print_answer("\n".join([counts.sentence(name), f"written to {escaped(str(target))}"]))


def _export_target(folder: RunFolder, name: str, output: str) -> Path:
    if not output:
        folder.exports.mkdir(exist_ok=True)
        return folder.exports / f"{name}.jsonl"
    target = Path(output)
    if target.is_dir():
        raise ConfigError(f"--output={output} is a folder; give a file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output={output}: there is no folder {target.parent}; make it first")
    if target.parent.resolve() == folder.path.resolve():
        raise ConfigError(
            f"--output={output} is among the run's own files; leave it out for {folder.exports}/{name}.jsonl"
        )
    return target


@dataclass(slots=True)
class ExportCounts:
    """Rows of an export."""

    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""

    def sentence(self, name: str) -> str:
        """Rows in = rows out + left out."""
        left_out = self.left_out.total()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{name}: {self.written + left_out:,} rows in = {self.written:,} rows out + {left_out:,} left out" + (
            f" ({reasons})" if reasons else ""
        )


def exported_lines(source: Path, export_row: ExportFunction, counts: ExportCounts) -> Iterator[bytes]:
    """The rows of a file in another format, a line at a time; counts them on the way."""
    for line in read_lines(source):
        row = decoded_row(line)
        exported = None if row is None else export_row(row)
        if exported is None:
            counts.left_out["no readable row" if row is None else "of a shape the format cannot hold"] += 1
            continue
        counts.written += 1
        yield orjson.dumps(exported, option=orjson.OPT_APPEND_NEWLINE)
    if has_torn_end(source):
        counts.left_out["torn last line"] += 1


def merge(folder: RunFolder, options: Mapping[str, Any]) -> None:
    """Make the run's published files again from its shards."""
    del options
    if not folder.row_files():
        raise ConfigError(f"{folder.path} holds no shards (batch_<number>.jsonl) to merge; nothing was changed")
    try:
        folder.open()
        run_json = _run_json(folder)
        statistics = publish(folder, run_json, _fates(folder, run_json))
    finally:
        folder.close()
    _note_torn(folder)
    print_summary(statistics, str(folder.path))


def stats(folder: RunFolder, options: Mapping[str, Any]) -> None:
    """Show the run's summary, counted anew."""
    del options
    run_json = _run_json(folder)
    statistics = recount(folder, run_json, _fates(folder, run_json))
    _note_torn(folder)
    _note_newer_rows(folder)
    print_summary(statistics, str(folder.path))


def _run_json(folder: RunFolder) -> dict[str, Any]:
    run_json = folder.read_run_json()
    if not run_json:
        _note(f"there is no readable {folder.run_json}: the dataset is taken to be the rows that are here")
    return run_json


def _fates(folder: RunFolder, run_json: Mapping[str, Any]) -> Fates:
    fates, knows_dataset = fates_of(folder, run_json)
    if run_json and not knows_dataset:
        _note(
            "the dataset is not where the run had it, or was changed since: rows of prompts that it has no more, if "
            "any, are taken too"
        )
    return fates


def _note_torn(folder: RunFolder) -> None:
    for path in folder.row_files():
        if has_torn_end(path):
            _note(f"{path}: the last line is torn (its write was cut off, or is going on), and is left out")


def _note_newer_rows(folder: RunFolder) -> None:
    merged_ns = folder.trajectories.stat().st_mtime_ns if folder.trajectories.exists() else 0
    if any(path.stat().st_mtime_ns > merged_ns for path in folder.shards()):
        _note(
            f"there are shards newer than {folder.trajectories}: "
            f"`python -m promptmill merge {folder.path}` brings in their rows, once no run is writing them"
        )


def _note(sentence: str) -> None:
    print(escaped(f"note: {sentence}"), file=sys.stderr, flush=True)


VERBS: dict[str, Verb] = {
    "export": Verb(
        export,
        "Write the rows of trajectories.jsonl in a format that trainers read",
        (
            Flag("format", "Export", "", one_of(tuple(EXPORTS)), f"One of {', '.join(EXPORTS)}", "(required)", "NAME"),
            Flag("output", "Export", "", text, "File to write", "<run folder>/exports/<format>.jsonl", "FILE"),
        ),
        "--format=NAME [--output=FILE]",
    ),
    "merge": Verb(merge, "Make trajectories.jsonl and statistics.json again from the shards, without any model call"),
    "stats": Verb(stats, "Show the summary of a run, counted anew from its files; writes nothing"),
}


def verb_named(name: str) -> Verb:
    """A verb of the registry. Raises ConfigError for an unknown one."""
    if name not in VERBS:
        raise ConfigError(f"unknown verb {name!r}; known: {', '.join(VERBS)}{did_you_mean(name, list(VERBS))}")
    return VERBS[name]


def existing_run(word: str) -> RunFolder:
    """The folder of a run, as typed. Raises ConfigError where there is none."""
    path = Path(word)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        near = Path("data") / word
        hint = f"; did you mean {near}?" if near.is_dir() else "; give the folder of a run, e.g. data/my_run"
        raise ConfigError(f"{word} {what}{hint}")
    folder = RunFolder(path)
    if not folder.has_run() and not folder.trajectories.exists():
        raise ConfigError(f"{word} is no run folder: there is no run.json and no batch_<number>.jsonl in it")
    return folder
