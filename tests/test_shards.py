"""Shards: what survives a kill in the middle of a write, and what a full disk does."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from promptmill.errors import THEN_AGAIN, StorageError
from promptmill.shards import append_lines, read_lines, repair_tail, write_atomic
from tests.fakes.model_server import REPOSITORY

ROW = b'{"prompt": "caf\xc3\xa9", "n": [1, {"x": "\\n"}]}'


def test_lines_come_back_as_they_were_appended(tmp_path):
    path = tmp_path / "batch_0.jsonl"
    append_lines(path, [b"1", b"2"])
    append_lines(path, [b"3"])
    assert list(read_lines(path)) == [b"1", b"2", b"3"]
    assert path.read_bytes() == b"1\n2\n3\n"


def test_appending_nothing_changes_nothing(tmp_path):
    path = tmp_path / "a"
    append_lines(path, [b"1"])
    append_lines(path, [])
    assert path.read_bytes() == b"1\n"


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(read_lines(tmp_path / "nowhere")) == []


def test_blank_lines_and_carriage_returns_are_left_out(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\n1\r\n  \n\r\n2\n\t\n")
    assert list(read_lines(path)) == [b"1", b"2"]


@pytest.mark.parametrize("kept", range(len(ROW)))
def test_a_torn_end_of_any_length_is_skipped_and_cut_off_before_an_append(tmp_path, kept):
    path = tmp_path / "a"
    path.write_bytes(b"1\n" + ROW[:kept])
    assert list(read_lines(path)) == [b"1"]
    append_lines(path, [ROW])
    assert path.read_bytes() == b"1\n" + ROW + b"\n"


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"a": 1', b"\xff", b"  "], ids=["zeros", "json", "bytes", "blank"])
def test_a_torn_end_of_any_kind_leaves_no_trace(tmp_path, tail):
    path = tmp_path / "a"
    path.write_bytes(tail)
    assert list(read_lines(path)) == []
    append_lines(path, [b"1"])
    assert path.read_bytes() == b"1\n"


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1\n" + ROW)
    assert list(read_lines(path)) == [b"1", ROW]
    append_lines(path, [b"3"])
    assert list(read_lines(path)) == [b"1", ROW, b"3"]


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 2, 3_500_000])
def test_a_line_larger_than_the_buffers_is_read_and_repaired(tmp_path, size):
    path = tmp_path / "a"
    long = orjson.dumps("x" * size)
    append_lines(path, [long, long])
    assert list(read_lines(path)) == [long, long]
    os.truncate(path, path.stat().st_size - 2)
    assert list(read_lines(path)) == [long]
    assert repair_tail(path) == len(long) + 1
    assert path.read_bytes() == long + b"\n"


@pytest.mark.parametrize("content", [b"", b"1\n", b"1\n2\n"])
def test_a_sound_end_is_left_alone(tmp_path, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    assert repair_tail(path) == len(content)
    assert path.read_bytes() == content


def in_a_process_with_file_limit(limit_bytes: int, code: str, *arguments: object) -> None:
    """Run code where no file can grow beyond a size: the kernel's own refusal, as on a full disk."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from promptmill.errors import StorageError\n"
        "from promptmill.shards import append_lines, write_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {resource.RLIM_INFINITY}))\n"
        f"{code}\n"
    )
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=True, cwd=REPOSITORY)


def test_a_refused_append_leaves_whole_lines_only(tmp_path):
    path = tmp_path / "a"
    append_lines(path, [b"1" * 900])
    in_a_process_with_file_limit(
        1000,
        "try:\n    append_lines(Path(sys.argv[1]), [b'2' * 50, b'3' * 500])\n"
        f"except StorageError as exc:\n    assert 'make room or access, {THEN_AGAIN}' in str(exc)\n"
        "else:\n    sys.exit('nothing was refused')",
        path,
    )
    assert path.read_bytes() == b"1" * 900 + b"\n"
    append_lines(path, [b"4"])
    assert list(read_lines(path)) == [b"1" * 900, b"4"]


def test_a_refused_replacement_leaves_the_old_file_and_nothing_beside(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, [b"old"])
    in_a_process_with_file_limit(
        1000,
        "try:\n    write_atomic(Path(sys.argv[1]), [b'new' * 1000])\n"
        "except StorageError:\n    pass\nelse:\n    sys.exit('nothing was refused')",
        path,
    )
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["a"]


def test_a_full_device_is_a_storage_error():
    with pytest.raises(StorageError, match="No space left on device"):
        append_lines(Path("/dev/full"), [b"1"])


def test_nothing_is_written_to_what_a_planted_link_leads_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine\n")
    for name in ("a", ".b.new"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(StorageError, match="symbolic links"):
        append_lines(tmp_path / "a", [b"1"])
    write_atomic(tmp_path / "b", [b"1"])
    assert precious.read_bytes() == b"mine\n"
    assert (tmp_path / "b").read_bytes() == b"1"


def test_a_missing_folder_is_a_storage_error(tmp_path):
    for write in (append_lines, write_atomic):
        with pytest.raises(StorageError, match="cannot write"):
            write(tmp_path / "nowhere" / "a", [b"1"])


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, [b"old and longer"])
    write_atomic(path, [b"n", b"ew"])
    assert path.read_bytes() == b"new"
    assert [child.name for child in tmp_path.iterdir()] == ["a"]


def test_a_replacement_that_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, [b"old"])

    def chunks():
        yield b"new"
        raise KeyError("the source of the rows broke")

    with pytest.raises(KeyError):
        write_atomic(path, chunks())
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["a"]
