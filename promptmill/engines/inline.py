"""Workers in the caller's own event loop: no processes, so a script needs no main guard."""

import asyncio
from collections.abc import Iterator

from promptmill.engines.base import Engine
from promptmill.records import Batch, WorkerEvents
from promptmill.worker import Worker


class InlineEngine(Engine):
    """One worker; `num_workers` batches overlap in it."""

    async def run(self, batches: Iterator[Batch], events: WorkerEvents) -> None:
        worker = Worker(self.settings, events)
        lanes = [asyncio.create_task(self._lane(worker, batches)) for _ in range(self.settings.config.num_workers)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            await worker.close()

    async def _lane(self, worker: Worker, batches: Iterator[Batch]) -> None:
        for batch in batches:
            await worker.run_batch(batch)
