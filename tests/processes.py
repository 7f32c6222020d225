"""What tests of other processes need: to find them, and to wait for what they do."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0
LOOK_S = 0.02


async def wait_until(condition: Callable[[], object]) -> None:
    """Look until a condition holds; for what another process does, which gives no event."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not so after {PATIENCE_S:.0f} s"
        await asyncio.sleep(LOOK_S)


def child_pids(pid: int, word: str) -> list[int]:
    """The children of a process whose command line contains a word."""
    children = (
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    )
    return [child for child in children if word in _command_line(child)]


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only as an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
