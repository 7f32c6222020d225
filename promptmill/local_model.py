"""The embedded model server (`--model=local`, `--model=local:FILE.gguf`): llama.cpp's, in a child process.

Invariants
    The server listens on this machine's loopback only, on a free port that the kernel picks.
    It never outlives the run: it ends at the end of the `async with`, and with the process that opened it, however
    that one ends (see `local_model_child`).

A child process, since its threads and memory would stay in the runner, and a crash of the library would be the run's.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from promptmill.config import ModelSettings, is_local_model
from promptmill.demo_model import fetch_demo_model
from promptmill.endpoints import NO_KEY, Endpoint
from promptmill.errors import ConfigError
from toolsets.text import ending

CHILD_FILE = Path(__file__).with_name("local_model_child.py")

START_TIMEOUT_S = 600.0
"""A model of many gigabytes is read from a slow disk in this time."""
STOP_TIMEOUT_S = 5.0

DEMO_SLOT_TOKENS = 4096
GGUF_SLOT_TOKENS = 16_384
"""Context of one request. The server lowers it to what the model was trained for."""
MAX_SLOTS = 4
"""On a few cores a second slot gains nothing and a fifth only takes memory; what comes beyond them waits its turn."""
MAX_THREADS = 16
SPIN_COUNT = "10000"
"""How long a thread at a barrier spins before it sleeps. Measured with two threads on two cores, tokens a second: by
default 108 when the cores are idle and 7 beside two busy processes; with this, 103 and 46."""
STDERR_TAIL_BYTES = 4000
MAX_TOLD_CHARS = 500

_LOAD_ERROR = re.compile(r"error loading model: (.*)")


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """What the child is told."""

    model_path: str
    num_slots: int
    context_tokens: int
    """Of all slots together."""
    num_threads: int


@contextlib.asynccontextmanager
async def local_model_server(
    model: str, *, parallel: int, environ: Mapping[str, str], note: Callable[[str], None]
) -> AsyncIterator[Endpoint]:
    """Serve a local model for as long as the block lasts.

    Args:
        model: `local` for the demonstration model, fetched on first use, or `local:` and the path of a GGUF file.
        parallel: Requests that may come at once. Those beyond the server's slots wait there.
        environ: Environment of the child processes; also says where the user's cache is.
        note: Takes one line about what is going on.

    Yields:
        Where to send requests. It has the trait `no_tool_template` when the model's chat template drops tools.

    Raises:
        ConfigError: the extra is missing, the file is no GGUF file, the demonstration model cannot be had, or the
            server would not start.
    """
    path = await local_model_file(model, environ, note)
    slot_tokens = DEMO_SLOT_TOKENS if model == "local" else GGUF_SLOT_TOKENS
    num_threads = thread_count()
    num_slots = max(1, min(parallel, MAX_SLOTS, 2 * num_threads))
    order = ServerOrder(str(path), num_slots, num_slots * slot_tokens, num_threads)
    process = await _start_child(order, environ)
    stderr = _Tail()
    draining = asyncio.ensure_future(stderr.drain(process.stderr))
    try:
        endpoint = await _endpoint(process, path, stderr, draining)
        ending = asyncio.ensure_future(_end_told(process, path, stderr, note))
        try:
            yield endpoint
        finally:
            ending.cancel()
    finally:
        await _stop(process)
        await draining


async def _end_told(
    process: asyncio.subprocess.Process, path: Path, stderr: "_Tail", note: Callable[[str], None]
) -> None:
    """Say so when the server ends before it is told to: every request then fails, and the reason is here."""
    status = await process.wait()
    note(f"the server of {path} ended during the run (status {status}): {stderr.text}")


@contextlib.asynccontextmanager
async def served(
    settings: ModelSettings, *, parallel: int, environ: Mapping[str, str], note: Callable[[str], None]
) -> AsyncIterator[ModelSettings]:
    """The model with the endpoint it has: its own, or the embedded server's, which lives as long as the block.

    Args and errors as for `local_model_server`.
    """
    if not is_local_model(settings.model):
        yield settings
        return
    async with local_model_server(settings.model, parallel=parallel, environ=environ, note=note) as endpoint:
        yield replace(settings, endpoint=endpoint)


async def local_model_file(model: str, environ: Mapping[str, str], note: Callable[[str], None]) -> Path:
    """The file that `local_model_server` would serve, fetched where need be. Args and errors as there."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError(f"--model={model} needs the extra `local`: pip install 'promptmill[local]' (or '.[local]')")
    if model == "local":
        return await fetch_demo_model(environ, note)
    path = Path(model.removeprefix("local:")).expanduser()
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise ConfigError(
            f"--model={model}: cannot read the file ({exc.strerror}); give the path of a GGUF file"
        ) from exc
    if magic != b"GGUF":
        raise ConfigError(f"--model={model} is no GGUF file: it starts with {magic!r} where GGUF files have b'GGUF'")
    return path.resolve()


async def _start_child(order: ServerOrder, environ: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # else the folder of the file comes first, and our modules hide those of the library: `statistics`, …
        str(CHILD_FILE),
        json.dumps(asdict(order)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"GOMP_SPINCOUNT": SPIN_COUNT, **environ},
        # Ctrl-C in the terminal is for the runner, which still wants answers to the requests it lets finish.
        start_new_session=True,
    )


class _Tail:
    """The last words of a stream that must be read on, or its writer would block."""

    def __init__(self) -> None:
        self._bytes = b""

    @property
    def text(self) -> str:
        """On one line: why the model could not be loaded, where that was said, else the last words."""
        text = self._bytes.decode(errors="replace")
        said = _LOAD_ERROR.findall(text)[-1:] or [ending(text, MAX_TOLD_CHARS)]
        return " ".join(said[0].split()) or "it said nothing"

    async def drain(self, stream: asyncio.StreamReader | None) -> None:
        """Read to the end, keeping the last part."""
        assert stream is not None
        while chunk := await stream.read(65536):
            self._bytes = (self._bytes + chunk)[-STDERR_TAIL_BYTES:]


async def _endpoint(
    process: asyncio.subprocess.Process, path: Path, stderr: _Tail, draining: asyncio.Future[None]
) -> Endpoint:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError as exc:
        raise ConfigError(f"the server of {path} was not up after {START_TIMEOUT_S:.0f} s: {stderr.text}") from exc
    if not line:
        status = await process.wait()
        await draining
        raise ConfigError(
            f"the server of {path} did not start (status {status}): {stderr.text}; "
            "check that the file is whole, of a kind that this llama.cpp knows, and that the memory suffices"
        )
    answer = json.loads(line)
    traits = frozenset() if answer["knows_tools"] else frozenset({"no_tool_template"})
    return Endpoint(answer["base_url"], NO_KEY, traits)


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def thread_count() -> int:
    """Threads to compute with: the physical cores that this process may use, without one for runner and tools.

    All threads meet at a barrier many times a token, where one that shares its core makes all the others wait.
    """
    return max(1, min(MAX_THREADS, _physical_cores() - 1))


def _physical_cores() -> int:
    if sys.platform != "linux":
        return os.cpu_count() or 1
    usable = os.sched_getaffinity(0)
    siblings = set()
    for number in usable:
        file = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            siblings.add(file.read_text(encoding="ascii").strip())
        except OSError:
            return len(usable)
    return len(siblings)
