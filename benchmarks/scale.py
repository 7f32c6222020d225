"""What a run of many prompts costs beside the model: start, resume scan, merge, memory. Linux.

    python -m benchmarks.scale                     # 10,000 and 100,000 finished rows
    python -m benchmarks.scale --rows=1000000      # a few minutes, and about 6 GB in --folder

Each figure stands beside its floor, measured in the same run on the same files: a plain copy of them, and reading and
parsing every line once with orjson. Each measurement is a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from promptmill.config import DEFAULT_SYSTEM_PROMPT, RunConfig, build_config, options_from
from promptmill.dataset import scan_dataset
from promptmill.errors import Outcome
from promptmill.finished import finished_sample
from promptmill.owed import Found
from promptmill.publish import publish
from promptmill.records import AgentResult, Message, ToolCall, ToolTally, Usage
from promptmill.run_folder import RunFolder
from promptmill.shards import read_lines
from toolsets.catalog import tools_in

BATCH_SIZE = 100
PROMPT_CHARS = 200
ANSWER = "<think>\nI look before I answer, and count the lines one by one.\n</think>\n" + "It has twelve lines. " * 8


def config_in(folder: Path) -> RunConfig:
    """The run that is measured."""
    given = {"dataset_file": str(folder / "prompts.jsonl"), "run_name": "run", "output_dir": str(folder / "data")}
    return build_config(options_from(given | {"base_url": "http://127.0.0.1:9/v1", "model": "m"}), {})


def make_dataset(folder: Path, samples: int) -> None:
    """Prompts of 200 characters, each another."""
    with (folder / "prompts.jsonl").open("wb") as file:
        for number in range(samples):
            prompt = f"Task {number}: count the lines of notes_{number}.txt. ".ljust(PROMPT_CHARS, "x")
            file.write(orjson.dumps({"prompt": prompt}, option=orjson.OPT_APPEND_NEWLINE))


def make_rows(folder: Path) -> None:
    """A finished row for each sample, as a worker makes it, in shards of a hundred."""
    config = config_in(folder)
    dataset = scan_dataset(config.dataset_file)
    call = ToolCall("call_1", "terminal", '{"command": "wc -l notes.txt"}')
    schemas = tuple(tool.schema() for tool in tools_in(["terminal"]))
    usage = Usage(prompt_tokens=900, completion_tokens=60, reported_calls=2)
    config.run_dir.mkdir(parents=True)
    for first in range(0, len(dataset), BATCH_SIZE):
        with (config.run_dir / f"batch_{first // BATCH_SIZE}.jsonl").open("wb") as shard:
            for index in range(first, min(first + BATCH_SIZE, len(dataset))):
                sample = dataset.sample(index)
                messages = [
                    Message("system", DEFAULT_SYSTEM_PROMPT),
                    Message("user", sample.prompt),
                    Message("assistant", "", reasoning="I count them.", tool_calls=(call,)),
                    Message("tool", '{"output":"12 notes.txt","exit_code":0}', tool_call_id="call_1", name="terminal"),
                    Message("assistant", ANSWER, reasoning="That is it."),
                ]
                tallies = {"terminal": ToolTally(success=1)}
                result = AgentResult(
                    Outcome.COMPLETED, "answer", messages, 2, usage, tallies, ("terminal",), schemas, duration_s=1.5
                )
                shard.write(finished_sample(config, result, sample, first // BATCH_SIZE).row + b"\n")
    dataset.close()


def start(folder: Path) -> float:
    """A fresh run, up to where its first batch is made."""
    config = config_in(folder)
    started_s = time.perf_counter()
    dataset = scan_dataset(config.dataset_file)
    Found(config, dataset, RunFolder(folder / "nowhere"))
    return time.perf_counter() - started_s


def resume_scan(folder: Path) -> float:
    """Reading every finished row and matching it with the dataset; the dataset's own scan is `start`."""
    config = config_in(folder)
    dataset = scan_dataset(config.dataset_file)
    started_s = time.perf_counter()
    found = Found(config, dataset, RunFolder(config.run_dir))
    assert not found.owed
    return time.perf_counter() - started_s


def merge(folder: Path) -> float:
    """Making `trajectories.jsonl` and `statistics.json`, forced to disk."""
    run_folder = RunFolder(config_in(folder).run_dir)
    run_folder.open()
    try:
        started_s = time.perf_counter()
        publish(run_folder, {}, {})
        return time.perf_counter() - started_s
    finally:
        run_folder.close()


def parse(folder: Path) -> float:
    """The floor: reading every line and parsing it once."""
    shards = RunFolder(config_in(folder).run_dir).shards()
    started_s = time.perf_counter()
    for shard in shards:
        for line in read_lines(shard):
            orjson.loads(line)
    return time.perf_counter() - started_s


def copy(folder: Path) -> float:
    """The other floor: a plain copy of the same files, forced to disk."""
    shards = RunFolder(config_in(folder).run_dir).shards()
    target = folder / "copy"
    started_s = time.perf_counter()
    with target.open("wb") as file:
        for shard in shards:
            with shard.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        os.fsync(file.fileno())
    elapsed_s = time.perf_counter() - started_s
    target.unlink()
    return elapsed_s


def whole_resume(folder: Path) -> float:
    """`--resume` of a run in which everything is done, as a user types it."""
    argv = [sys.executable, "batch_runner.py", "--resume", "--run_name=run", f"--output_dir={folder / 'data'}"]
    argv += [f"--dataset_file={folder / 'prompts.jsonl'}", "--base_url=http://127.0.0.1:9/v1", "--model=m"]
    started_s = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - started_s


MEASUREMENTS: Mapping[str, Callable[[Path], float]] = {
    function.__name__: function for function in (start, parse, copy, resume_scan, merge, whole_resume)
}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own: seconds, and peak memory in MB."""
    argv = [sys.executable, "-m", "benchmarks.scale", f"--measure={name}", f"--folder={folder}"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(rows: int, folder: Path) -> dict[str, Any]:
    """All figures for one size."""
    make_dataset(folder, rows)
    make_rows(folder)
    size_mb = sum(path.stat().st_size for path in RunFolder(config_in(folder).run_dir).shards()) / 1e6
    figures = {name: measured(name, folder) for name in MEASUREMENTS}
    floor_s = figures["parse"]["seconds"]
    for figure in figures.values():
        figure["mb_per_s"] = round(size_mb / figure["seconds"], 1)
        figure["of_parse"] = round(figure["seconds"] / floor_s, 2)
        figure["of_copy"] = round(figure["seconds"] / figures["copy"]["seconds"], 2)
    return {"rows": rows, "size_mb": round(size_mb, 1), "figures": figures}


def table(result: Mapping[str, Any]) -> str:
    """The figures of one size as a table."""
    lines = [
        f"{result['rows']:,} rows, {result['size_mb']:,.0f} MB",
        f"  {'':14}{'seconds':>9}{'MB/s':>9}{'x parse':>9}{'x copy':>9}{'peak MB':>9}",
    ]
    lines += [
        f"  {name:14}{figure['seconds']:>9.2f}{figure['mb_per_s']:>9.0f}{figure['of_parse']:>9.2f}"
        f"{figure['of_copy']:>9.2f}{figure['peak_mb']:>9.0f}"
        for name, figure in result["figures"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the flags and print."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    flags.add_argument("--folder", type=Path, help="where the files are made (default: a temporary folder)")
    flags.add_argument("--json", type=Path, help="write the figures here too")
    flags.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.measure:
        seconds = MEASUREMENTS[given.measure](given.folder)
        who = resource.RUSAGE_CHILDREN if given.measure == "whole_resume" else resource.RUSAGE_SELF
        print(json.dumps({"seconds": seconds, "peak_mb": resource.getrusage(who).ru_maxrss / 1024}))
        return
    results = []
    for rows in given.rows:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            results.append(measure(rows, Path(folder)))
        print(table(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
