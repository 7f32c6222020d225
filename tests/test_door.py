"""The door: what a person typed reaches the command as it was typed."""

import subprocess
import sys
from pathlib import Path

import pytest

from promptmill.door import open_door
from promptmill.flags import FLAG_BY_NAME
from tests.fakes.model_server import ServerProcess
from tests.rows import write_dataset

ROOT = Path(__file__).resolve().parents[1]
RUN_NAME = FLAG_BY_NAME["run_name"]


def opened(argv: list[str]) -> list[str | None]:
    seen = []

    def main(run_name: str | None = None) -> None:
        seen.append(run_name)

    open_door(main, argv, [RUN_NAME], "usage", "summary")
    return seen


@pytest.mark.parametrize("value", ["help", "2024_01", "null", "a,b", "-1", "{}", "'x'", "True", ""])
def test_a_value_is_the_text_that_was_typed_whatever_it_looks_like(value: str) -> None:
    assert opened([f"--run_name={value}"]) == opened(["--run_name", value]) == [value]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"], ["--run_name=x", "--help"]])
def test_help_is_answered_and_the_command_not_called(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert opened(argv) == []
    assert capsys.readouterr().out.startswith("Usage: usage")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_run_whose_streams_are_closed_is_run(closed: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, ["a"])
    with ServerProcess("one_turn") as server:
        flags = f"--dataset_file=prompts.jsonl --run_name=r --model=m --base_url={server.base_url}"
        command = f"{sys.executable} {ROOT / 'batch_runner.py'} {flags} {closed}"
        assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert (tmp_path / "data/r/trajectories.jsonl").read_text().count("\n") == 1
