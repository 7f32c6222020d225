"""The contract of an engine: run batches on workers, hand on what they finish."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator

from promptmill.config import WorkerSettings
from promptmill.endpoints import is_private
from promptmill.limiter import FIRST_LIMIT, AdaptiveLimit
from promptmill.records import Batch, RunEvents

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal or a `kill` of the whole group sends to every process of a run, and only the runner acts on."""


class Engine(ABC):
    """Runs one run's batches. Used once."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings

    @abstractmethod
    async def run(self, batches: Iterator[Batch], events: RunEvents) -> None:
        """Run all batches, `num_workers` of them at once, each batch's samples in order.

        A batch is taken from the iterator only when a worker is free for it. Cancelling ends every worker, and
        samples that were in flight are then owed; a sample handed to `events` before that stays handed on.

        Raises:
            RunStoppedError: the run cannot go on; every worker has ended.
        """


def new_limit(settings: WorkerSettings) -> AdaptiveLimit | None:
    """The run's limit on requests in flight; None when it is switched off.

    A server of one's own starts with all that the workers ask for; one that others use too is approached from below.
    """
    config = settings.config
    if config.in_flight_limit == "off":
        return None
    most = config.num_workers if config.in_flight_limit == "adaptive" else int(config.in_flight_limit)
    most = min(most, config.num_workers)
    first = most if is_private(config.model.endpoint.host) else min(FIRST_LIMIT, most)
    return AdaptiveLimit(maximum=most, limit=first)
