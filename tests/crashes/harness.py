"""A warm process that forks a child for each run that is to be killed: a start costs a fork, not an interpreter.

It reads jobs as JSON lines and answers each with a line. It has one thread whenever it forks, and stays single in
everything else too: the scripted server and the tests are other processes.
"""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import tqdm

from promptmill.__main__ import main as run_verb
from promptmill.errors import PromptmillError
from promptmill.event_loop import run_in_loop
from promptmill.runner import BatchRunner
from tests.crashes.points import Points, watch
from tests.fakes.model_server import REPOSITORY
from tests.rows import write_dataset
from toolsets.sandboxes import supervised

MAX_RUN_S = 60
"""After so long a child has hung, and is ended by an alarm."""
DONE, STOPPED, BROKEN = 0, 1, 70
HUNG = -signal.SIGALRM
ERROR_MARK = "! "
KILLED = -signal.SIGKILL
Tell = Callable[[str], None]
OPTIONS: dict[str, Any] = {
    "dataset_file": "prompts.jsonl", "run_name": "run", "model": "test/model", "sandbox": "local",
    "distribution": "terminal_only", "batch_size": 3, "num_workers": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and how a child is to end; see `points`."""

    number: int
    how: str
    among: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """What became of a child."""

    code: int
    """DONE, KILLED or HUNG; STOPPED and BROKEN with `error`."""
    calls: list[str]
    """Name and file of each call that wrote to the run folder."""
    error: str


class Harness:
    """The process, as the tests use it; a context manager."""

    def __init__(self, server_url: str) -> None:
        self.server_url = server_url

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp")
        environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        environ["TMPDIR"] = str(self.scratch)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crashes.harness", self.server_url],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ,
        )  # fmt: skip
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def scratch(self) -> Path:
        """In the environment of all that the children start."""
        return Path(self._scratch.name)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.communicate()
        with contextlib.suppress(OSError):  # a sandbox may be ending
            self._scratch.cleanup()

    def run(self, folder: Path, stop: Stop | None = None, **options: Any) -> Forked:
        """A run of `folder/prompts.jsonl` into `folder/data/run`, by `BatchRunner(...).run`."""
        return self._ask({"folder": str(folder), "options": OPTIONS | options, "stop": stop})

    def merge(self, folder: Path, stop: Stop | None = None) -> Forked:
        """`python -m promptmill merge` of `folder/data/run`."""
        return self._ask({"folder": str(folder), "verb": "merge", "stop": stop})

    def _ask(self, job: Mapping[str, Any]) -> Forked:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(orjson.dumps(job, option=orjson.OPT_APPEND_NEWLINE))
        self._process.stdin.flush()
        told = orjson.loads(self._process.stdout.readline())
        calls = [line for line in told["lines"] if not line.startswith(ERROR_MARK)]
        error = "\n".join(line.removeprefix(ERROR_MARK) for line in told["lines"] if line.startswith(ERROR_MARK))
        return Forked(told["code"], calls, error)


# ── the process itself ────────────────────────────────────────────────────────────────────────────────────


def serve(server_url: str) -> None:
    """Answer jobs until stdin ends."""
    warm_up(server_url)
    for line in sys.stdin.buffer:
        told = forked(orjson.loads(line))
        sys.stdout.buffer.write(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()


def warm_up(server_url: str) -> None:
    """Have every import and cache of a run done, by a run."""
    tqdm.tqdm.monitor_interval = 0  # its monitor is a thread that stays
    with tempfile.TemporaryDirectory() as folder, Path(folder, "shown").open("w") as shown:
        write_dataset(Path(folder), ["tools to warm up"])
        options = OPTIONS | {"dataset_file": f"{folder}/prompts.jsonl", "output_dir": folder}
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            run_in_loop(BatchRunner(**options, base_url=f"{server_url}/warm/0/v1").run())
    supervised.own_mark.cache_clear()  # a child is another process
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()


def forked(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in a child; returns its end and what it told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os._exit(child(job, writing))
        finally:
            os._exit(BROKEN)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        lines = told.read().decode().splitlines()
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "lines": [line for line in lines if line]}


def child(job: Mapping[str, Any], writing: int) -> int:
    """Do a job. What it shows goes to a file beside the run."""
    signal.alarm(MAX_RUN_S)
    os.chdir(job["folder"])
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    real_write = os.write

    def tell(line: str) -> None:
        real_write(writing, line.encode() + b"\n")

    try:
        if "verb" in job:
            watch_calls(job, tell)
            return run_verb([job["verb"], "data/run"])
        return run_batch(job, tell)
    except (PromptmillError, asyncio.CancelledError) as exc:
        tell(f"{ERROR_MARK}{type(exc).__name__}: {exc}")
        return STOPPED
    except Exception:  # noqa: BLE001  # the child's end: it is told, and fails the test
        for line in traceback.format_exc().splitlines():
            tell(f"{ERROR_MARK}{line}")
        return BROKEN


def watch_calls(job: Mapping[str, Any], tell: Tell, cancel: Callable[[], object] = lambda: None) -> None:
    """See the calls that write to the run folder, and end at one of them if the job says so."""
    stop = job["stop"] or {"number": 0, "how": "", "among": ""}
    watch(Points(Path("data/run").absolute(), stop["number"], stop["among"], stop["how"], tell, cancel))


def run_batch(job: Mapping[str, Any], tell: Tell) -> int:
    """Run a batch that may be killed or cancelled."""
    runner = BatchRunner(**job["options"])

    async def run() -> None:
        running = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert running
        watch_calls(job, tell, lambda: loop.call_soon_threadsafe(running.cancel))
        await runner.run()

    run_in_loop(run())
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
