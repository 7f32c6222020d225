"""A deadline that stands still while one waits for something that is not one's own fault."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from promptmill.records import Usage


class PromptClock:
    """Counts a prompt's own time, and ends it when that is spent.

    `async with PromptClock(timeout_s) as clock` raises TimeoutError from the block; in `clock.paused()` no time passes.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._paused_left_s: float | None = None
        """What is left while it stands still."""
        self.unanswered = Usage()
        """Of replies that became no turn (empty, refused): they were billed too."""

    async def __aenter__(self) -> "PromptClock":
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def is_spent(self) -> bool:
        """Whether the deadline has passed."""
        return self._timeout.expired()

    @property
    def left_s(self) -> float:
        """Seconds of its own time that are left; infinite without a deadline."""
        if self._paused_left_s is not None:
            return self._paused_left_s
        when = self._timeout.when()
        return math.inf if when is None else max(0.0, when - asyncio.get_running_loop().time())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still for the block, and put the deadline off by what it took."""
        when = self._timeout.when()
        if when is None or self._timeout.expired():
            yield
            return
        loop = asyncio.get_running_loop()
        self._paused_left_s = left_s = when - loop.time()
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._paused_left_s = None
            if not self._timeout.expired():
                self._timeout.reschedule(loop.time() + left_s)
