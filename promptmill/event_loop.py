"""The event loop that doors and worker processes run in, uvloop where there is one; what outlasts a cancellation."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

try:
    from uvloop import new_event_loop
except ImportError:  # a platform without uvloop
    from asyncio import new_event_loop  # type: ignore[assignment]


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def to_its_end(doing: Coroutine[Any, Any, T]) -> T:
    """Await something that no cancellation may break off: one is raised after it, unless that failed."""
    task = asyncio.ensure_future(doing)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancellation = exc
    result = task.result()
    if cancellation is not None:
        raise cancellation
    return result
