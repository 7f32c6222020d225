"""The command: exit codes, refusals, signals, what is shown; and the builders of whole runs, which others use too."""

import asyncio
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from promptmill.runner import BatchRunner
from tests.fakes.model_server import (
    REPOSITORY,
    Answer,
    RecordedRequest,
    ScriptedServer,
    by_turn,
    call,
    fail,
    one_turn,
    say,
)
from tests.processes import wait_until
from tests.rows import prompts_in, read_jsonl, write_dataset
from toolsets.distributions import DISTRIBUTIONS

# ── whole runs ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RunFiles:
    """What a run has left behind."""

    path: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A JSONL file's rows; none when there is no such file."""
        return read_jsonl(self.path / name) if (self.path / name).exists() else []

    def json(self, name: str) -> dict[str, Any]:
        return orjson.loads((self.path / name).read_bytes())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.lines("trajectories.jsonl")

    @property
    def row(self) -> dict[str, Any]:
        """The only row of the merge."""
        (row,) = self.rows
        return row

    @property
    def prompts(self) -> list[str]:
        return prompts_in(self.path / "trajectories.jsonl")

    @property
    def samples(self) -> dict[str, int]:
        """The counts of `statistics.json`."""
        return self.json("statistics.json")["samples"]

    @property
    def shards(self) -> dict[str, list[str]]:
        """Shard name -> its prompts, in order."""
        return {path.name: prompts_in(path) for path in sorted(self.path.glob("batch_*.jsonl"))}


def run_options(
    base_url: str, prompts: Iterable[str | Mapping[str, Any] | bytes] | None, **given: Any
) -> dict[str, Any]:
    """Options of a run in the current folder, whose dataset is written there unless `prompts` is None."""
    if prompts is not None:
        write_dataset(Path.cwd(), prompts)
    return {"dataset_file": "prompts.jsonl", "run_name": "run", "model": "test/model", "base_url": base_url} | given


async def run_inline(
    base_url: str,
    prompts: Iterable[str | Mapping[str, Any] | bytes] | None = None,
    *,
    resume: bool = False,
    **given: Any,
) -> RunFiles:
    """Run a batch in this event loop; see `run_options`."""
    options = run_options(base_url, prompts, **given)
    await BatchRunner(**options).run(resume=resume)
    return RunFiles(Path(options.get("output_dir", "data"), options["run_name"]))


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Command:
    """A running command of ours."""

    process: asyncio.subprocess.Process

    async def stderr_until(self, word: str) -> str:
        """Read stderr up to a word; what was read is not in `ended().stderr`."""
        assert self.process.stderr is not None
        return (await self.process.stderr.readuntil(word.encode())).decode()

    async def until(self, event: asyncio.Event) -> None:
        """Wait for something that happens while the command runs."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.process.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        assert event.is_set(), (await self.ended()).stderr

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> Ended:
        stdout, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return Ended(self.process.returncode, stdout.decode(), stderr.decode())


def as_flags(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


@asynccontextmanager
async def started(
    *argv: str, script: str = "batch_runner.py", timeout_s: float = 60, **environ: str
) -> AsyncIterator[Command]:
    """`python batch_runner.py ARGV`, warnings as errors; killed at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(REPOSITORY / script), *argv,
        stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env={**os.environ, "COLUMNS": "120", **environ}, limit=1 << 24,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
        with suppress(TimeoutError):  # what it has started may live on and hold the pipes
            async with asyncio.timeout(10):
                await process.communicate()


async def command(*argv: str, script: str = "batch_runner.py", timeout_s: float = 60, **environ: str) -> Ended:
    """Run a command of ours to its end."""
    async with started(*argv, script=script, timeout_s=timeout_s, **environ) as running:
        return await running.ended()


# ── processes of a run ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short folder for `TMPDIR`: its path is then in the environment or command line of all that a run starts."""
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as name:
        yield Path(name)


def processes_of(scratch: Path) -> dict[int, str]:
    """Process id -> command line of whatever runs with that scratch folder."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes()
                if os.fsencode(scratch) in words + (folder / "environ").read_bytes():
                    found[int(folder.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return found


async def wait_for_end_of(pids: Iterable[int], timeout_s: float = 20) -> None:
    """Wait until processes have ended, whoever started them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            ended = await asyncio.to_thread(poll.poll, timeout_s * 1000)
            os.close(descriptor)
            assert ended, f"process {pid} still runs"


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("--batchsize=3", "unknown flag --batchsize; did you mean --batch_size?"),
        ("--num-worker=3", "unknown flag --num-worker; did you mean --num_workers?"),
        ("prompts.jsonl", "'prompts.jsonl' is not a flag; write --name=value"),
        ("-v", "'-v' is not a flag"),
        ("--batch_size=0", "--batch_size is 0; it must be between 1 and"),
        ("--num_workers=1e3", "--num_workers is '1e3'; give a whole number"),
        ("--temperature=warm", "--temperature is 'warm'; give a number between 0 and 2"),
        ("--resume=maybe", "--resume is 'maybe'; give true or false"),
        ("--reasoning_effort=lots", "--reasoning_effort is 'lots'; known: none, minimal, low"),
        ("--provider_sort=prise", "did you mean 'price'?"),
        ("--run_name=../elsewhere", "--run_name='../elsewhere' cannot name a folder"),
        ("--run_name=", "--run_name is required"),
        ("--dataset_file=", "--dataset_file is required"),
        ("--dataset_file=nowhere.jsonl", "--dataset_file=nowhere.jsonl does not exist"),
        ("--distribution=terminal_onyl", "did you mean 'terminal_only'?"),
        ("--engine=ray", "unknown engine 'ray'; known: processes, inline"),
        ("--sandbox=chroot", "--sandbox=chroot: unknown sandbox 'chroot'; known: auto, bubblewrap, local"),
        ("--base_url=ftp://x", "--base_url=ftp://x is no address"),
        ("--config=nowhere.toml", "--config=nowhere.toml: cannot read it"),
        ("--model=local", "--base_url contradicts --model=local"),
    ],
)
async def test_bad_usage_exits_with_2_before_anything_is_made_or_called(server, tmp_path, word, complaint):
    options = as_flags(run_options(server.base_url, ["a"]))
    ended = await command(*options, word)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (server.count, [path.name for path in tmp_path.iterdir()]) == (0, ["prompts.jsonl"])


async def test_a_model_file_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    ended = await command("--dataset_file=prompts.jsonl", "--run_name=r", "--model=local:nowhere.gguf")
    assert ended.code == 2
    assert "--model=local:nowhere.gguf: cannot read the file" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


async def test_no_flag_at_all_says_what_is_required():
    ended = await command()
    assert (ended.code, ended.stderr) == (2, "error: --dataset_file is required; see --help\n")


async def test_a_dataset_without_a_usable_row_is_refused_with_its_lines(server, tmp_path):
    options = run_options(server.base_url, [b"{", b"[]", {"no": "prompt"}, {"prompt": " "}])
    ended = await command(*as_flags(options))
    assert ended.code == 2
    assert "no usable row" in ended.stderr
    for line in ("line 1: not valid JSON", "line 2: not a JSON object", 'line 3: no "prompt" field', "line 4: "):
        assert f"\n  {line}" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


# ── quick answers ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def without_openai(tmp_path) -> dict[str, str]:
    """An environment in which importing openai ends the program."""
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "openai.py").write_text("raise SystemExit('openai was imported')")
    return {"PYTHONPATH": str(tmp_path / "poison")}


@pytest.mark.parametrize("word", ["--list_distributions", "--help", "-h", "--list_distributions=yes"])
async def test_quick_answers_never_import_openai(without_openai, word):
    ended = await command(word, **without_openai)
    assert (ended.code, ended.stderr) == (0, "")
    names = [f"Distribution: {name}\n" for name in DISTRIBUTIONS] if "list" in word else ["--dataset_file=FILE"]
    assert all(name in ended.stdout for name in names)


async def test_a_run_does_import_openai(without_openai, server):
    ended = await command(*as_flags(run_options(server.base_url, ["a"], engine="inline")), **without_openai)
    assert "openai was imported" in ended.stderr


def cpu_seconds(argv: Sequence[str]) -> float:
    """CPU that a Python command takes, as the kernel counted it."""
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_listing_distributions_costs_less_than_half_of_importing_openai():
    listing, importing = [], []
    for _ in range(5):
        listing.append(cpu_seconds([str(REPOSITORY / "batch_runner.py"), "--list_distributions"]))
        importing.append(cpu_seconds(["-c", "import openai"]))
    assert statistics.median(listing) < 0.5 * statistics.median(importing)


# ── how it ends ───────────────────────────────────────────────────────────────────────────────────────────


async def test_all_done_exits_with_0_and_prints_the_summary(server):
    ended = await command(*as_flags(run_options(server.base_url, ["a", "b"], engine="inline")))
    assert ended.code == 0, ended.stderr
    assert "Run run" in ended.stdout
    assert re.search(r"completed +2", ended.stdout)
    assert "data/run/trajectories.jsonl" in ended.stdout


async def test_a_failed_prompt_exits_with_1_and_is_shown_when_it_happens(server):
    shown = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "bad":
            return fail(400, "no such\x1b[2J parameter")
        await shown.wait()
        return one_turn(request)

    server.script = script
    async with started(*as_flags(run_options(server.base_url, ["bad", "a"], batch_size=1))) as running:
        await running.stderr_until("first failure (rejected_request): ")
        line = await running.stderr_until("\n")
        shown.set()
        ended = await running.ended()
    assert "answered 400: no such\\x1b[2J parameter" in line
    assert ended.code == 1
    assert RunFiles(Path("data/run")).prompts == ["a"]


async def test_a_refused_key_exits_with_1_and_says_what_to_do(server):
    server.script = lambda request: fail(401, "bad key") if request.prompt == "b" else one_turn(request)
    ended = await command(*as_flags(run_options(server.base_url, ["a", "b", "c"], num_workers=1)))
    assert ended.code == 1
    assert (
        "answered 401: bad key; check the key and the account, then start again (a run: with --resume)" in ended.stderr
    )
    assert "Traceback" not in ended.stderr
    run = RunFiles(Path("data/run"))
    assert (run.prompts, run.samples["pending"]) == (["a"], 2)


async def test_a_run_that_exists_is_refused_without_resume(server):
    run = await run_inline(server.base_url, ["a"])
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    ended = await command(*as_flags(run_options(server.base_url, None)))
    assert (ended.code, ended.stdout) == (2, "")
    assert "data/run already holds a run: add --resume to go on with it" in ended.stderr
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    assert server.count == 1


async def test_run_name_and_resume_alone_go_on_with_the_runs_own_options(server):
    await run_inline(
        server.base_url, ["a"], max_tokens=7, system_prompt="Be brief.", max_samples="all", engine="inline", seed=5
    )
    write_dataset(Path.cwd(), ["a", "b"])
    ended = await command("--run_name=run", "--resume")
    assert ended.code == 0, ended.stderr
    assert "Resuming: 1 of 2 prompts are done" in ended.stderr
    first, second = server.bodies
    assert second | {"messages": []} == first | {"messages": []}
    assert second["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}]
    rows = RunFiles(Path("data/run")).rows
    assert [row["seed"] for row in rows] == [5, 5]
    ended = await command("--run_name=run", "--resume")
    assert (ended.code, server.count) == (0, 2)


async def test_what_is_typed_on_resume_wins_over_the_runs_own_options(server):
    await run_inline(server.base_url, ["a"], max_tokens=7, temperature=0.5)
    write_dataset(Path.cwd(), ["a", "b"])
    ended = await command("--run_name=run", "--resume", "--max_tokens=8", "--engine=inline")
    assert ended.code == 0, ended.stderr
    assert [(body["max_tokens"], body["temperature"]) for body in server.bodies] == [(7, 0.5), (8, 0.5)]


async def test_resume_of_a_name_that_does_not_exist_says_so(server):
    ended = await command("--run_name=nowhere", "--resume")
    assert ended.code == 2
    assert "data/nowhere" in ended.stderr
    assert not Path("data").exists()
    ended = await command(*as_flags(run_options(server.base_url, ["a"], engine="inline")), "--resume")
    assert ended.code == 0
    assert "There is no run in data/run to go on with: it starts now" in ended.stderr


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sandbox", ["auto", "local"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
async def test_a_signal_keeps_what_is_finished_leaves_nothing_running_and_resume_completes_it(
    server, scratch, number, code, sandbox
):
    held: set[str] = set()
    all_held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "d" and request.turn == 0:
            lasting = {"command": f"exec -a {scratch} sleep 600", "background": True}
            return call("terminal", lasting, reasoning="r")
        if request.prompt in ("c", "d"):
            held.add(request.prompt)
            if len(held) == 2:
                all_held.set()
            await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    options = run_options(server.base_url, list("abcde"), batch_size=3, sandbox=sandbox, grace_s=0)
    async with started(*as_flags(options), TMPDIR=str(scratch)) as running:
        await running.until(all_held)
        await wait_until(lambda: f"{scratch} 600" in str(processes_of(scratch)))
        family = processes_of(scratch)
        running.send(number)
        ended = await running.ended()
    assert (ended.code, "Traceback" in ended.stderr) == (code, False)
    assert "Stopping: what is finished is kept, --resume goes on." in ended.stderr
    await wait_for_end_of(family)
    assert processes_of(scratch) == {}
    assert list(scratch.iterdir()) == []
    run = RunFiles(Path("data/run"))
    assert (run.shards, run.prompts) == ({"batch_0.jsonl": ["a", "b"]}, ["a", "b"])
    assert run.json("checkpoint.json")["completed_prompts"] == [0, 1]
    assert (run.samples["completed"], run.samples["failed"], run.samples["pending"]) == (2, 0, 3)
    server.script = one_turn
    ended = await command("--run_name=run", "--resume")
    assert ended.code == 0, ended.stderr
    assert Counter(run.prompts) == Counter("abcde")


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_a_second_sigint_leaves_at_once_with_valid_files(server, scratch, grace_s):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "b":
            held.set()
            await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    options = run_options(server.base_url, ["a", "b"], sandbox="local", grace_s=grace_s)
    async with started(*as_flags(options), TMPDIR=str(scratch)) as running:
        await running.until(held)
        others = [pid for pid in processes_of(scratch) if pid != running.process.pid]
        for pid in others:  # workers that do not answer: after the first SIGINT the runner waits for them
            os.kill(pid, signal.SIGSTOP)
        try:
            running.send(signal.SIGINT)
            await running.stderr_until("gain: leave at once.")
            async with asyncio.timeout(5):
                running.send(signal.SIGINT)
                await wait_for_end_of([running.process.pid])
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
        ended = await running.ended()
    assert (ended.code, "Traceback" in ended.stderr) == (130, False)
    await wait_for_end_of(others)
    run = RunFiles(Path("data/run"))
    assert run.shards == {"batch_0.jsonl": ["a"]}
    assert orjson.loads((run.path / "run.json").read_bytes())["run_name"] == "run"
    server.script = one_turn
    ended = await command("--run_name=run", "--resume")
    assert (ended.code, run.prompts) == (0, ["a", "b"])


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────


async def test_dataset_problems_are_named_by_line_the_first_ten_shown_and_all_kept(server):
    broken = [b"{"] * 12
    ended = await command(*as_flags(run_options(server.base_url, ["a", b"", *broken, "b"], engine="inline")))
    assert ended.code == 0
    shown = [line for line in ended.stderr.splitlines() if line.startswith("  ")]
    assert [line.split(":")[0] for line in shown[:10]] == [f"  line {number}" for number in range(3, 13)]
    assert shown[10:] == ["  … and 2 more, all listed in run.json"]
    assert "Skipped 12 lines of prompts.jsonl:" in ended.stderr
    skipped = RunFiles(Path("data/run")).json("run.json")["dataset"]["skipped"]
    assert [line["line_number"] for line in skipped] == list(range(3, 15))
    assert all("not valid JSON" in line["reason"] for line in skipped)


async def test_progress_is_plain_lines_where_stderr_is_no_terminal(server):
    ended = await command(*as_flags(run_options(server.base_url, ["a", "b", "c"], engine="inline")))
    assert re.search(r"^3/3 prompts \(done 3, [0-9.]+/min, [0-9]+ tok/s\)$", ended.stderr, re.MULTILINE)
    assert not re.search(r"[\r\x1b█]", ended.stderr + ended.stdout)


async def test_progress_is_a_bar_on_a_terminal(server):
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 120))
    options = run_options(server.base_url, ["a", "b", "c"], engine="inline")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(REPOSITORY / "batch_runner.py"), *as_flags(options)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=end, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    os.close(end)
    shown = await asyncio.to_thread(read_to_the_end, terminal)
    assert await asyncio.to_thread(process.wait) == 0
    assert re.search(r"100%\|█+\| 3/3 prompts? \[.*done 3, [0-9.]+/min, [0-9]+ tok/s\]", shown)


def read_to_the_end(terminal: int) -> str:
    """All that a program writes to a terminal until it closes it."""
    chunks = []
    with suppress(OSError):  # Linux says so when the other end is closed
        while chunk := os.read(terminal, 65536):
            chunks.append(chunk)
    os.close(terminal)
    return b"".join(chunks).decode()


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x00\u202e"


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_hostile_text_never_reaches_the_terminal_raw(server, engine):
    server.script = by_turn(
        call("terminal", {"command": "printf '\\033[31mred\\r'"}, reasoning=f"thinking {HOSTILE}"),
        call(f"tool{HOSTILE}", {"x": HOSTILE}, reasoning="r"),
        say(f"saying {HOSTILE}", reasoning="r"),
        fail(400, f"refusing {HOSTILE}"),
    )
    options = run_options(server.base_url, [f"prompt {HOSTILE}", b'{"\x1b[2J'], engine=engine, log_prefix_chars=1000)
    ended = await command(*as_flags(options), "--verbose")
    assert ended.code == 0, ended.stderr
    for text in (ended.stderr, ended.stdout):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[0] says    saying \\x1b]0;owned\\x07" in ended.stderr
    assert "[0] thinks  thinking \\x1b]0;owned" in ended.stderr
    assert "red" in ended.stderr
    server.script = lambda request: fail(400, f"refusing {HOSTILE}")
    ended = await command(*as_flags(options | {"run_name": "failing"}))
    assert "refusing \\x1b]0;owned" in ended.stderr
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ended.stderr + ended.stdout)
