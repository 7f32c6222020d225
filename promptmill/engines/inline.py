"""Workers in the caller's own event loop: no processes, so a script needs no main guard."""

import asyncio
from collections.abc import Iterator

from promptmill.engines.base import Engine, new_limit
from promptmill.limiter import Gate, GateReport, LimitKeeper
from promptmill.records import Batch, RunEvents
from promptmill.worker import Worker


class InlineEngine(Engine):
    """One worker; `num_workers` batches overlap in it."""

    async def run(self, batches: Iterator[Batch], events: RunEvents) -> None:
        slots = self.settings.config.num_workers
        keeper = LimitKeeper(new_limit(self.settings), {0: slots}, events.limit_changed)

        def report(news: GateReport) -> None:
            for order in keeper.take(0, news).values():
                gate.obey(order)

        gate = Gate(slots, report)
        gate.obey(keeper.first_share(0))
        worker = Worker(self.settings, events, gate)
        lanes = [asyncio.create_task(self._lane(worker, batches, events)) for _ in range(slots)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                # A lane that is being cancelled is closing its sandbox: a second cancel would break that off.
                if not lane.cancelling():
                    lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            await worker.close()

    async def _lane(self, worker: Worker, batches: Iterator[Batch], events: RunEvents) -> None:
        for batch in batches:
            if not events.may_start(batch.number):
                return
            await worker.run_batch(batch)
