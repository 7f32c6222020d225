"""The README's commands run as they are written, and its table of flags is the command's own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.model_server import ServerProcess
from tests.readme_commands import README, shell_blocks

ROOT = README.parent
RUN_BY_CI = 2
"""The first two blocks make an environment and install into it: `.ci/run` runs those on a clean clone."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout, without its run folders."""
    for name in ("batch_runner.py", "run_agent.py", "promptmill", "toolsets"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    for dataset in (ROOT / "data").glob("*.jsonl"):
        if dataset.is_file():
            shutil.copy(dataset, tmp_path / "data")
    return tmp_path


def run(block: str, checkout: Path, base_url: str) -> str:
    """Run a block with the test's own interpreter, its batches against a scripted server instead of a paid one."""
    script = re.sub(r"--base_url=\S+", "", block)
    script = re.sub(r"(?m)^python batch_runner.py(?!.*--list)", f"python batch_runner.py --base_url={base_url}", script)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_batch_command_runs_as_written(checkout: Path) -> None:
    blocks = [block for block in shell_blocks()[RUN_BY_CI:] if "batch_runner.py" in block]
    assert len(blocks) >= 6
    with ServerProcess("three_turns") as server:
        for block in blocks:
            run(block, checkout, server.base_url)
    merged = {
        path.parent.name: len(path.read_text().splitlines()) for path in checkout.glob("data/*/trajectories.jsonl")
    }
    assert merged == {"my_first_run": 10, "coding_v1": 8, "eval_gpt4": 8, "on_my_server": 10}


def test_the_commands_on_a_run_folder_run_as_written(checkout: Path) -> None:
    block = next(block for block in shell_blocks() if "-m promptmill" in block)
    with ServerProcess("three_turns") as server:
        run(
            "python batch_runner.py --dataset_file=data/prompts.jsonl --run_name=quickstart --model=m",
            checkout,
            server.base_url,
        )
    run(block, checkout, "")
    assert (checkout / "data/quickstart/exports/hermes.jsonl").read_text().count("\n") == 10


def test_the_python_example_runs_as_written(checkout: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert example
    with ServerProcess("three_turns") as server:
        script = example[1].replace("http://127.0.0.1:8000/v1", server.base_url)
        (checkout / "example.py").write_text(script)
        run("python example.py", checkout, "")
    assert len((checkout / "data/tool-training/trajectories.jsonl").read_text().splitlines()) == 10


@pytest.mark.local_model
def test_the_one_prompt_command_runs_as_written(checkout: Path) -> None:
    block = next(block for block in shell_blocks() if "run_agent.py" in block)
    assert "hello from promptmill" in run(block, checkout, "")


def test_the_flag_table_is_the_commands_own_help() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "batch_runner.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert f"```text\n{shown}\n```" in README.read_text()


def test_the_example_row_has_the_keys_of_a_real_one() -> None:
    example = next(
        json.loads(block)
        for block in re.findall(r"^```json\n(\{.*?\n)```", README.read_text(), re.DOTALL | re.MULTILINE)
        if '"prompt_index"' in block
    )
    from promptmill.rows import DOCUMENTED_KEYS

    assert tuple(example) == DOCUMENTED_KEYS
