"""The terminal tool: state between calls, limits, and what it says of how a command ended."""

import pytest

from tests.toolbench import Bench
from toolsets.tools.terminal import explain_exit

pytest_plugins = ["tests.toolbench_fixtures"]


async def test_output_and_exit_code_come_back_and_a_failing_command_is_no_failed_call(every_bench: Bench) -> None:
    answer = await every_bench.ok("terminal", command="echo out; echo err >&2; exit 3")
    assert answer.content == {"output": "out\nerr", "exit_code": 3, "error": None}


async def test_folder_and_exported_variables_last_from_one_call_to_the_next(every_bench: Bench) -> None:
    await every_bench.sh("mkdir -p 'a b' && cd 'a b' && export NAME='x\n\"y\" $z' OTHER=1; plain=2")
    assert await every_bench.sh('echo "$NAME|$OTHER|$plain"; basename "$PWD"') == 'x\n"y" $z|1|\na b'


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("exit 3", 3),
        ("set -e; false; echo never", 1),
        ("set -euo pipefail; echo $undefined", 1),
        ("trap 'echo bye' EXIT", 0),
        ("true # a comment", 0),
        ("cat <<END\ntext\nEND", 0),
        ("cat <<END\nunfinished", 0),
        ("set -C -x", 0),
        ("export() { echo mine; }; pwd() { echo mine; }", 0),
        ("sleep 30 & true", 0),
        ("set -T; trap 'echo debug' DEBUG", 0),
        ("echo '", 2),
    ],
)
async def test_state_lasts_however_a_command_ends(bench: Bench, ending: str, exit_code: int) -> None:
    await bench.sh("mkdir inner; cd inner; export FIRST=1")
    answer = await bench.ok("terminal", command=f"builtin export SECOND=2\n{ending}")
    assert answer["exit_code"] == exit_code
    assert await bench.sh('echo "$FIRST|$SECOND|$(basename "$PWD")"') == "1|2|inner"


async def test_a_shorter_state_leaves_nothing_of_a_longer_one(bench: Bench) -> None:
    await bench.sh(f"mkdir {'x' * 200}; cd {'x' * 200}; export LONG=$(seq -s, 5000) GONE=1")
    await bench.sh("cd ..; unset GONE; export LONG=short")
    await bench.ok("write_file", path="here", content="")
    assert await bench.sh('echo "$LONG|$GONE"; ls -d here; env | grep -c return || true') == "short|\nhere\n0"


@pytest.mark.parametrize("ending", ["exec true", "kill -9 $$", "exec sh -c 'exit 0'"])
async def test_a_shell_that_cannot_leave_its_state_leaves_the_earlier_one(bench: Bench, ending: str) -> None:
    await bench.sh("export FIRST=1; mkdir inner; cd inner")
    await bench.ok("terminal", command=f"export SECOND=2; cd /; {ending}")
    assert await bench.sh('echo "$FIRST|$SECOND|$(basename "$PWD")"') == "1||inner"


async def test_state_survives_the_removal_of_all_temporary_files(bench: Bench) -> None:
    await bench.sh('export KEPT=1; rm -rf "$TMPDIR"/* "$TMPDIR"/.[!.]*')
    assert await bench.sh("echo $KEPT") == "1"


async def test_a_removed_current_folder_is_said_and_the_working_folder_taken(bench: Bench) -> None:
    await bench.sh('mkdir gone; cd gone; rmdir "$PWD"')
    output = await bench.sh("pwd")
    assert "is gone" in output
    assert output.splitlines()[-1] == bench.sandbox.cwd


async def test_the_state_costs_the_command_neither_arguments_nor_line_numbers(bench: Bench) -> None:
    assert await bench.sh('echo "$#|$0|${-//[hBc]/}"') == "0|bash|"
    answer = await bench.ok("terminal", command="true\nnosuchprogram")
    assert answer["output"] == "bash: line 2: nosuchprogram: command not found"
    assert answer["exit_code"] == 127


async def test_workdir_is_for_one_call_and_is_taken_from_the_current_folder(every_bench: Bench) -> None:
    await every_bench.sh("mkdir -p one/two; cd one")
    assert (await every_bench.sh("pwd; export SET=1", workdir="two")).endswith("/one/two")
    assert (await every_bench.sh("pwd; echo $SET")).endswith("/one\n1")
    assert await every_bench.sh('[ "$PWD" = "$HOME" ] && echo home', workdir="~") == "home"


@pytest.mark.parametrize("workdir", ["nowhere", "/nowhere", "file", "$(touch hacked)", "-", ";touch hacked"])
async def test_a_workdir_that_cannot_be_entered_is_an_error_and_nothing_runs(bench: Bench, workdir: str) -> None:
    await bench.put("file", b"")
    answer = await bench.call("terminal", command="touch ran", workdir=workdir)
    assert "does not exist or is not a folder" in answer.error
    assert await bench.sh("ls") == "file"


async def test_a_timeout_is_a_failure_of_kind_timeout_and_keeps_the_output(every_bench: Bench) -> None:
    await every_bench.sh("export KEPT=1")
    answer = await every_bench.call("terminal", command="echo before; export KEPT=2; sleep 60", timeout=1)
    assert answer.content == {
        "output": "before\n[Command timed out after 1s]",
        "exit_code": 124,
        "error": None,
    }
    assert (answer.outcome.failed, answer.outcome.kind) == (True, "timeout")
    assert answer.outcome.duration_s >= 1
    assert await every_bench.sh("echo $KEPT") == "1"


async def test_a_longer_timeout_than_allowed_is_refused_before_anything_runs(bench: Bench) -> None:
    answer = await bench.call("terminal", command="touch ran", timeout=601)
    assert answer.outcome.kind == "invalid_arguments"
    assert "at most 600" in answer.error
    assert await bench.sh("ls") == ""


async def test_long_output_keeps_its_start_and_end_and_says_what_is_missing(bench: Bench) -> None:
    output = await bench.sh("seq 1 2000000")
    total = sum(len(str(i)) + 1 for i in range(1, 2_000_001))
    head, notice, tail = output.partition(" chars omitted out of ")
    assert head.startswith("1\n2\n3\n")
    assert tail.endswith("1999999\n2000000")
    assert notice
    omitted = int(head.rpartition(" ")[2])
    assert abs(total - omitted - 50_000) <= 1
    assert 50_000 <= len(output) < 50_100


async def test_output_of_exactly_the_limit_is_whole(bench: Bench) -> None:
    assert await bench.sh("head -c 50000 /dev/zero | tr '\\0' x") == "x" * 50_000


async def test_escape_sequences_and_bad_bytes_are_cleaned_and_indentation_is_kept(bench: Bench) -> None:
    output = await bench.sh(r"printf '  \033[1;31mred\033[0m \033]0;title\007é\377\033[K\n\n'")
    assert output == "  red é\ufffd"


async def test_commands_have_no_input_and_background_children_do_not_delay_the_result(bench: Bench) -> None:
    assert await bench.sh("cat; (sleep 60; echo late) & echo now") == "now"


async def test_a_command_longer_than_the_kernel_takes_as_an_argument_runs(bench: Bench) -> None:
    text = "x'y\\z\n" * 40_000
    await bench.sh(f"cat > big <<'END'\n{text}END")
    assert await bench.get("big") == text.encode()


async def test_a_nul_in_a_command_is_refused(bench: Bench) -> None:
    answer = await bench.call("terminal", command="echo a\0b")
    assert answer.outcome.kind == "tool_error"


async def test_an_empty_command_does_nothing(bench: Bench) -> None:
    assert await bench.sh("") == ""


async def test_a_status_of_one_that_is_an_answer_is_explained(bench: Bench) -> None:
    answer = await bench.ok("terminal", command="grep nothing /dev/null")
    assert answer["exit_code"] == 1
    assert answer["exit_code_meaning"] == "No matches found (not an error)"


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("cat f | grep 'a|b;c'", "No matches"),
        ("cd x && LANG=C /usr/bin/diff a b", "differ"),
        ("cd x\ngit diff --exit-code", "differ"),
        ("git grep x", "No matches"),
        ("[ -f x ]", "false"),
        ("test -f x\n", "false"),
        ("grep x f | wc -l", ""),
        ("grep x f; false", ""),
        ("grep 'unfinished", ""),
        ("python grep.py", ""),
        ("", ""),
    ],
)
def test_only_the_last_program_explains_the_status(command: str, word: str) -> None:
    meaning = explain_exit(command, 1)
    assert word in meaning
    assert bool(meaning) == bool(word)
    assert explain_exit(command, 2) == ""
