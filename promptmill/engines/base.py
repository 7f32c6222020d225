"""The contract of an engine: run batches on workers, hand on what they finish."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from promptmill.config import WorkerSettings
from promptmill.records import Batch, WorkerEvents


class Engine(ABC):
    """Runs one run's batches. Used once."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings

    @abstractmethod
    async def run(self, batches: Iterator[Batch], events: WorkerEvents) -> None:
        """Run all batches, `num_workers` of them at once, each batch's samples in order.

        A batch is taken from the iterator only when a worker is free for it. Cancelling ends every worker, and
        samples that were in flight are then owed; a sample handed to `events` before that stays handed on.

        Raises:
            RunStoppedError: the run cannot go on; every worker has ended.
        """
