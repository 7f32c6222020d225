"""The process tool: background processes that are really followed, fed and ended."""

import pytest

from tests.toolbench import Bench
from toolsets.tools.process import MAX_PROCESSES

pytest_plugins = ["tests.toolbench_fixtures"]


async def start(bench: Bench, command: str, **arguments: object) -> str:
    answer = await bench.ok("terminal", command=command, background=True, **arguments)
    assert answer["output"] == "Background process started"
    assert answer["session_id"].startswith("proc_")
    assert len(answer["session_id"]) == len("proc_") + 12
    assert answer["pid"] > 0
    assert (answer["exit_code"], answer["error"]) == (0, None)
    return str(answer["session_id"])


async def test_a_background_process_is_listed_fed_waited_for_and_read(every_bench: Bench) -> None:
    session = await start(every_bench, 'while read -r line; do echo "got $line"; done; exit 4')
    listed = await every_bench.ok("process", action="list")
    assert [(entry["session_id"], entry["status"]) for entry in listed["processes"]] == [(session, "running")]
    written = await every_bench.ok("process", action="write", session_id=session, data="one\ntw")
    assert written.content == {"status": "ok", "bytes_written": 6}
    await every_bench.ok("process", action="submit", session_id=session, data="o")
    await every_bench.ok("process", action="close", session_id=session)
    waited = await every_bench.ok("process", action="wait", session_id=session, timeout=20)
    assert (waited["status"], waited["exit_code"], waited["output"]) == ("exited", 4, "got one\ngot two")
    polled = await every_bench.ok("process", action="poll", session_id=session)
    assert (polled["status"], polled["exit_code"]) == ("exited", 4)
    assert polled["output_preview"] == "got one\ngot two"


async def test_it_starts_where_the_terminal_is_and_leaves_the_terminal_as_it_was(bench: Bench) -> None:
    await bench.sh("mkdir -p a/b; cd a; export NAME=x")
    session = await start(bench, 'echo "$NAME $(basename "$PWD")"; cd /; export NAME=y', workdir="b")
    waited = await bench.ok("process", action="wait", session_id=session, timeout=20)
    assert waited["output"] == "x b"
    assert await bench.sh('echo "$NAME $(basename "$PWD")"') == "x a"


async def test_a_wait_that_ends_before_the_process_says_so_and_is_no_failure(bench: Bench) -> None:
    session = await start(bench, "echo early; sleep 60")
    waited = await bench.ok("process", action="wait", session_id=session, timeout=1)
    assert (waited["status"], waited["output"]) == ("timeout", "early")


async def test_kill_ends_the_process_and_a_second_kill_says_it_has_ended(every_bench: Bench) -> None:
    session = await start(every_bench, "sleep 60 & sleep 60")
    killed = await every_bench.ok("process", action="kill", session_id=session)
    assert (killed["status"], killed["exit_code"]) == ("killed", 137)
    again = await every_bench.ok("process", action="kill", session_id=session)
    assert again["status"] == "already_exited"
    answer = await every_bench.call("process", action="submit", session_id=session, data="x")
    assert "takes no more input" in answer.error


async def test_log_pages_by_lines_from_the_end_or_from_an_offset(bench: Bench) -> None:
    session = await start(bench, "seq 1 500")
    await bench.ok("process", action="wait", session_id=session, timeout=20)
    last = await bench.ok("process", action="log", session_id=session)
    assert last["output"].split("\n") == [str(i) for i in range(301, 501)]
    assert (last["total_lines"], last["showing"]) == (500, "200 lines")
    first = await bench.ok("process", action="log", session_id=session, offset=2, limit=3)
    assert first["output"] == "2\n3\n4"


async def test_output_is_kept_within_bounds_and_the_rest_counted(bench: Bench) -> None:
    session = await start(bench, "yes 0123456789 | head -c 1000000")
    await bench.ok("process", action="wait", session_id=session, timeout=20)
    log = await bench.ok("process", action="log", session_id=session)
    assert log["dropped_bytes"] == 800_000


async def test_an_unknown_or_missing_session_is_an_error_that_says_what_to_do(bench: Bench) -> None:
    unknown = await bench.call("process", action="poll", session_id="proc_000000000000")
    assert unknown["status"] == "not_found"
    assert "no background process" in unknown.error
    missing = await bench.call("process", action="poll")
    assert "needs a session_id" in missing.error
    session = await start(bench, "cat")
    no_data = await bench.call("process", action="write", session_id=session)
    assert "needs data" in no_data.error


async def test_ended_processes_make_room_for_new_ones_and_running_ones_do_not(bench: Bench) -> None:
    first = await start(bench, "true")
    await bench.ok("process", action="wait", session_id=first, timeout=20)
    sessions = [await start(bench, "cat") for _ in range(MAX_PROCESSES)]
    listed = await bench.ok("process", action="list")
    assert [entry["session_id"] for entry in listed["processes"]] == sessions
    refused = await bench.call("terminal", command="true", background=True)
    assert "kill one" in refused.error


@pytest.mark.slow
async def test_input_that_nobody_reads_is_an_error_within_seconds(bench: Bench) -> None:
    session = await start(bench, "sleep 60")
    answer = await bench.call("process", action="write", session_id=session, data="x" * 1_000_000)
    assert "did not read its input" in answer.error
