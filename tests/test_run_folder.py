"""The run folder: where a row goes, that it is on disk when it is reported, and that one process writes."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from promptmill.errors import ConfigError, Outcome, StorageError
from promptmill.run_folder import RunFolder
from tests.fakes.model_server import REPOSITORY
from tests.rows import make_result, prompts_in, read_jsonl


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "data" / "my_run")
    folder.open()
    yield folder
    folder.close()


@pytest.fixture
def fsyncs(monkeypatch):
    """Paths that were forced to disk, in order."""
    forced = []
    fsync = os.fsync

    def recording_fsync(descriptor):
        forced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    return forced


FILE_BY_OUTCOME = {
    Outcome.COMPLETED: "batch_3.jsonl",
    Outcome.PARTIAL: "batch_3.jsonl",
    Outcome.DISCARDED: "discarded.jsonl",
    Outcome.REFUSED: "failed.jsonl",
    Outcome.FAILED_TRANSIENT: "failed.jsonl",
    Outcome.FAILED_PERMANENT: "failed.jsonl",
    Outcome.INTERRUPTED: "failed.jsonl",
}


@pytest.mark.parametrize("outcome", Outcome)
async def test_a_row_goes_where_its_outcome_says(folder, outcome):
    await folder.append(make_result("a", batch_number=3, outcome=str(outcome)))
    files = [path.name for path in folder.path.iterdir() if not path.name.startswith(".")]
    assert files == [FILE_BY_OUTCOME[outcome]]
    assert prompts_in(folder.path / files[0]) == ["a"]


async def test_a_row_is_forced_to_disk_before_it_is_reported(folder, fsyncs):
    await folder.append(make_result("a"))
    assert str(folder.shard(0)) in fsyncs
    assert str(folder.path) in fsyncs  # the new file's name, too


async def test_rows_that_wait_together_share_their_fsyncs(folder, fsyncs):
    results = [make_result(f"{n}", batch_number=n % 4) for n in range(400)]
    await asyncio.gather(*map(folder.append, results))
    assert sum(fsyncs.count(str(path)) for path in folder.shards()) <= 8
    for number, path in enumerate(folder.shards()):
        assert prompts_in(path) == [f"{n}" for n in range(400) if n % 4 == number]


async def test_rows_of_one_shard_keep_their_order_under_load(folder):
    async def append_in_order(number):
        for n in range(50):
            await folder.append(make_result(f"{n}", batch_number=number))

    await asyncio.gather(*map(append_in_order, range(8)))
    assert all(prompts_in(path) == [f"{n}" for n in range(50)] for path in folder.shards())
    assert len(folder.shards()) == 8


async def test_a_cancelled_append_is_still_on_disk_when_the_caller_leaves(folder):
    appending = asyncio.create_task(folder.append(make_result("a")))
    await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    assert prompts_in(folder.shard(0)) == ["a"]


async def test_a_file_that_refuses_fails_its_rows_alone(folder):
    folder.shard(0).symlink_to("/dev/full")
    outcomes = await asyncio.gather(
        *(folder.append(make_result("a", batch_number=n)) for n in (0, 1, 0)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [StorageError, type(None), StorageError]
    assert prompts_in(folder.shard(1)) == ["a"]
    folder.shard(0).unlink()
    await folder.append(make_result("b"))
    assert prompts_in(folder.shard(0)) == ["b"]


async def test_a_cancelled_append_to_a_full_disk_leaves_quietly(folder):
    folder.shard(0).symlink_to("/dev/full")
    appending = asyncio.create_task(folder.append(make_result("a")))
    await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending


async def test_a_closed_folder_takes_no_rows(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()
    folder.close()
    with pytest.raises(StorageError, match="not open for writing"):
        await folder.append(make_result("a"))


async def test_no_caller_waits_for_ever_when_the_writing_breaks_off(folder):
    appending = asyncio.create_task(folder.append(make_result("a")))
    await asyncio.sleep(0)
    folder._draining.cancel()
    with pytest.raises(StorageError, match="not written"):
        await asyncio.wait_for(appending, 5)
    await folder.append(make_result("b"))
    assert "b" in prompts_in(folder.shard(0))


async def test_a_second_writer_is_refused_and_told_who_the_first_is(folder):
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on .*take another --run_name"):
        RunFolder(folder.path).open()
    folder.close()
    second = RunFolder(folder.path)
    second.open()
    second.close()


def test_a_killed_run_leaves_no_lock(tmp_path):
    hold = (
        "import sys, time\nfrom pathlib import Path\nfrom promptmill.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]))\nfolder.open()\nprint('open', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        try:
            with pytest.raises(ConfigError, match=f"process {holder.pid} on "):
                RunFolder(tmp_path).open()
        finally:
            holder.kill()
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder(tmp_path / "file" / "my_run").open()


def test_a_folder_that_cannot_be_written_to_is_a_storage_error_and_not_locked(tmp_path):
    (tmp_path / ".lock_owner").mkdir()
    refused = RunFolder(tmp_path)  # kept, for a lock is released with its last reference
    with pytest.raises(ConfigError, match="cannot write to the run folder"):
        refused.open()
    (tmp_path / ".lock_owner").rmdir()
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()


def test_shards_are_listed_by_number_and_nothing_else_is_a_shard(folder):
    for name in ("batch_10.jsonl", "batch_2.jsonl", "batch_x.jsonl", "batch_1.jsonl.bak", "xbatch_1.jsonl"):
        (folder.path / name).write_bytes(b"")
    assert [path.name for path in folder.shards()] == ["batch_2.jsonl", "batch_10.jsonl"]


def test_a_folder_has_a_run_once_it_has_rows_or_its_configuration(tmp_path):
    folder = RunFolder(tmp_path)
    assert not RunFolder(tmp_path / "nowhere").has_run()
    assert not folder.has_run()
    folder.failed.write_bytes(b"")
    assert folder.has_run()
    assert folder.row_files() == [folder.failed]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_an_unreadable_run_json_is_as_good_as_none(tmp_path, content):
    folder = RunFolder(tmp_path)
    assert folder.read_run_json() == {}
    folder.run_json.write_bytes(content)
    assert folder.read_run_json() == {}


async def test_a_json_file_is_published_whole_and_readable(folder):
    await folder.publish_json(folder.run_json, {"name": "é"})
    assert folder.read_run_json() == {"name": "é"}
    assert folder.run_json.read_text(encoding="utf-8") == '{\n  "name": "é"\n}\n'


async def test_events_are_lines_of_the_log(folder):
    await folder.log_event("started", samples=3)
    await folder.log_event("ended")
    assert read_jsonl(folder.log) == [{"event": "started", "samples": 3}, {"event": "ended"}]
    assert orjson.loads(folder.log.read_bytes().splitlines()[0])["event"] == "started"
