"""A disk that is full, or that takes nothing: what was finished is there, and the run goes on once there is room.

The disks are real: file systems in memory of a few pages, and read-only ones, mounted by the bubblewrap that comes with
us, for one process tree each. Refusals of single files are in `test_shards`, `test_run_folder`, `test_nothing_lost`;
signals and their exit codes in `test_command` and `test_nothing_lost`; aimed kills of workers and runners, with what
they leave running, in `test_engines` and `test_nothing_lost`.
"""

import asyncio
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from promptmill.errors import THEN_AGAIN
from tests.crashes.conftest import SCALE
from tests.crashes.folders import assert_derived_files_are_whole, prompt_of, saved_rows
from tests.crashes.harness import OPTIONS
from tests.fakes.model_server import REPOSITORY, Answer, RecordedRequest, ScriptedServer, one_turn
from tests.rows import prompts_in, write_dataset
from tests.test_command import as_flags, command, run_options, started
from toolsets.sandboxes.bubblewrap import find_bwrap

PROMPTS = [f"prompt {n}" for n in range(12)]
DISK_BYTES = 1 << 20
IN_FLIGHT = 2
ROOMS_KB = (16, 64, 88, 128) if SCALE == 1 else range(16, 152, 8)
"""By turns it is a first shard that is refused, the checkpoint, a later shard, the merge."""


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


def batch(base_url: str, *flags: str) -> str:
    """The batch command as a shell command."""
    options = OPTIONS | {"base_url": base_url, "output_dir": "disk", "engine": "inline"}
    return shlex.join([sys.executable, "-W", "error", str(REPOSITORY / "batch_runner.py"), *as_flags(options), *flags])


async def on_disk(mount: list[str], script: str) -> None:
    """Run a shell script with another file system on the folder `disk`. Needs no privileges but a user namespace."""
    Path("disk").mkdir()
    argv = [find_bwrap(), "--dev-bind", "/", "/", *mount, "--chdir", str(Path.cwd()), "bash", "-euc", script]
    ended = await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("room_kb", ROOMS_KB)
async def test_a_full_disk_stops_the_run_and_the_run_goes_on_once_there_is_room(server, room_kb):
    write_dataset(Path.cwd(), PROMPTS)
    disk = str(Path("disk").absolute())
    script = f"""
        head -c {DISK_BYTES - room_kb * 1024} /dev/zero > disk/filler
        code=0; {batch(server.base_url)} 2> full.txt || code=$?; echo $code > full.code
        cp -r disk/run full
        rm disk/filler
        code=0; {batch(server.base_url, "--resume")} 2> room.txt || code=$?; echo $code > room.code
        cp -r disk/run room
    """
    await on_disk(["--size", str(DISK_BYTES), "--tmpfs", disk], script)
    told = Path("full.txt").read_text()
    assert Path("full.code").read_text() == "1\n", told
    said = r"error: disk/run/\S+: cannot write \(No space left on device\); make room or access, "
    assert re.fullmatch(said + re.escape(THEN_AGAIN), told.splitlines()[-1]), told
    assert "Traceback" not in told
    kept = [prompt_of(row) for row in saved_rows(Path("full")).all]
    assert_derived_files_are_whole(Path("full"))
    assert published_of(Path("full")) <= set(kept)
    assert Path("room.code").read_text() == "0\n", Path("room.txt").read_text()
    assert sorted(prompts_in(Path("room/trajectories.jsonl"))) == sorted(PROMPTS)
    asked = server.prompts
    assert len(asked) <= len(PROMPTS) + IN_FLIGHT
    assert all(asked.count(prompt) == 1 for prompt in kept)


def published_of(run: Path) -> set[str]:
    """What a run folder's derived files call done."""
    done: set[str] = set()
    if (run / "checkpoint.json").exists():
        done.update(PROMPTS[i] for i in orjson.loads((run / "checkpoint.json").read_bytes())["completed_prompts"])
    if (run / "trajectories.jsonl").exists():
        done.update(prompts_in(run / "trajectories.jsonl"))
    return done


async def test_a_read_only_folder_is_refused_before_anything_is_sent(server):
    write_dataset(Path.cwd(), PROMPTS)
    disk = str(Path("disk").absolute())
    script = f"code=0; {batch(server.base_url)} 2> told.txt || code=$?; echo $code > told.code"
    await on_disk(["--ro-bind", disk, disk], script)
    told = Path("told.txt").read_text()
    assert Path("told.code").read_text() == "2\n", told
    assert "error: disk/run: cannot make the run folder (Read-only file system)" in told
    assert server.count == 0


async def test_a_run_folder_that_became_read_only_is_refused_before_anything_is_sent(server):
    write_dataset(Path.cwd(), PROMPTS)
    disk = str(Path("disk").absolute())
    script = f"code=0; {batch(server.base_url, '--resume')} 2> told.txt || code=$?; echo $code > told.code"
    Path("disk/run").mkdir(parents=True)
    Path("disk/run/.lock").touch()
    Path("disk").rename("filled")
    await on_disk(["--ro-bind", str(Path("filled").absolute()), disk], script)
    assert Path("told.code").read_text() == "2\n", Path("told.txt").read_text()
    assert "Read-only file system" in Path("told.txt").read_text()
    assert server.count == 0


async def test_a_second_start_is_told_who_has_the_run_and_disturbs_nothing(server):
    held, release = asyncio.Event(), asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        held.set()
        await release.wait()
        return one_turn(request)

    server.script = script
    async with started(*as_flags(run_options(server.base_url, PROMPTS[:2]))) as first:
        await first.until(held)
        second = await command("--run_name=run", "--resume")
        release.set()
        ended = await first.ended()
    assert (ended.code, second.code) == (0, 2)
    who = f"is in use by process {first.process.pid} on {re.escape(socket.gethostname())}, started at 20[0-9-]* "
    assert re.search(who, second.stderr), second.stderr
    assert server.prompts == PROMPTS[:2]
    assert list(Path("data").iterdir()) == [Path("data/run")]
