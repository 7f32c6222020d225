"""What is installed is ours and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    return next(target.glob("*.whl"))


def test_the_wheel_ships_our_names_only(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "batch_runner.py",
        "run_agent.py",
        "promptmill",
        "toolsets",
    }


def test_the_wheel_holds_every_module_and_no_test_or_data(wheel: Path) -> None:
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    sources = [*(ROOT / "promptmill").rglob("*.py"), *(ROOT / "toolsets").rglob("*.py")]
    expected = {str(path.relative_to(ROOT)) for path in sources} | {"batch_runner.py", "run_agent.py"}
    assert shipped == expected


def test_the_wheel_names_its_optional_parts(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    text = archive.read(metadata).decode()
    for extra in ("local", "yaml", "test"):
        assert f"Provides-Extra: {extra}" in text
    assert "License-Expression: MIT" in text
