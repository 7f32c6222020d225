"""The batch command between its door and the runner: what is printed, which signals end it, how it exits.

The first signal stops the starting, and what is in flight gets `--grace_s` to finish; then it is cancelled. The second
leaves at once. Exit codes: 0 all done; 1 some failed or the run stopped early; 2 bad usage, nothing started; 130, 143
and 129 for SIGINT, SIGTERM and SIGHUP.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from promptmill.door import BAD_USAGE, DONE, INCOMPLETE, complain
from promptmill.errors import RunStoppedError, UsageError
from promptmill.event_loop import run_in_loop
from promptmill.runner import BatchRunner
from promptmill.wording import counted


def run_batch(given: Mapping[str, Any]) -> int:
    """Run a batch from the options that were given, as typed or of their own type; returns the exit code."""
    options = {"engine": None, **given}
    try:
        return run_in_loop(_run_until_signal(BatchRunner(**options)))
    except UsageError as exc:
        return complain(exc, BAD_USAGE)
    except RunStoppedError as exc:
        return complain(exc, INCOMPLETE)


async def _run_until_signal(runner: BatchRunner) -> int:
    running = asyncio.ensure_future(runner.run())
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if received:
            # The second time: leave now. Rows are whole on disk, and workers end with their sockets.
            with contextlib.suppress(OSError):
                told = "Left at once: saved rows are whole, what was in flight is lost and uncounted; --resume goes on"
                print(f"\n{told}", file=sys.stderr, flush=True)
            os._exit(128 + number)
        received.append(number)
        in_flight = runner.stop_starting()
        grace_s = runner.grace_s if in_flight else 0.0
        with contextlib.suppress(OSError):  # the terminal may be what went away
            print(f"\n{_stopping(in_flight, grace_s)}", file=sys.stderr)
        loop.call_later(grace_s, running.cancel)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        await running
    except asyncio.CancelledError:
        if not received:
            raise
    if received:
        return 128 + received[0]
    samples = runner.statistics["samples"]
    return INCOMPLETE if samples["failed"] or (samples["pending"] and not runner.is_dry_run) else DONE


def _stopping(in_flight: int, grace_s: float) -> str:
    """What a first signal does, as a line."""
    if not grace_s:
        return "Stopping: what is finished is kept, --resume goes on. Again: leave at once."
    get = "gets" if in_flight == 1 else "get"
    return (
        f"Stopping: {counted(in_flight, 'prompt')} in flight {get} {grace_s:g} s to finish; again: leave at once. "
        "What is finished is kept, --resume goes on"
    )
