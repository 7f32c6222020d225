"""What one worker runs: batches that overlap in one event loop, each batch's samples one after another.

A worker never touches the run folder. What it finishes it hands on as encoded rows.
"""

import asyncio
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace

from promptmill.agent import Agent, ToolOffer, record_failure
from promptmill.client import ModelClient
from promptmill.config import WorkerSettings
from promptmill.errors import Outcome, RunStoppedError
from promptmill.escaping import preview
from promptmill.finished import finished_sample, unstarted
from promptmill.limiter import Gate
from promptmill.prices import Prices
from promptmill.records import AgentResult, Batch, Sample, SampleResult, TurnEvent, WorkerEvents
from promptmill.secrets import mask_of
from toolsets.base import ToolContext
from toolsets.catalog import tools_in
from toolsets.distributions import sample_toolsets
from toolsets.sandboxes import new_sandbox
from toolsets.sandboxes.base import Sandbox, SandboxError, SandboxSpec

logger = logging.getLogger(__name__)


class Worker:
    """Runs batches. Close it after the last."""

    def __init__(self, settings: WorkerSettings, events: WorkerEvents, gate: Gate) -> None:
        self.settings = settings
        self.events = events
        self._prices = Prices(settings.config.model)
        self.client = ModelClient(settings.config.model, max_connections=settings.conversations, gate=gate)
        self._agents: dict[int, Agent] = {}
        """By sample: what is known of a conversation until its row is handed on."""

    @property
    def least_left_s(self) -> float:
        """How soon the first of the conversations that are held now must have ended, in seconds of its own time."""
        clocks = (agent.clock for agent in self._agents.values() if agent.clock is not None)
        return min((clock.left_s for clock in clocks), default=self.settings.config.agent.prompt_timeout_s)

    async def close(self) -> None:
        """Close the connections to the model."""
        await self.client.close()

    async def run_batch(self, batch: Batch) -> None:
        """Run a batch's samples in order: the first at once, each further one when the one before lets it start.

        Raises:
            RunStoppedError: the run must stop; samples not yet handed on are owed again.
        """
        for place, sample in enumerate(batch.samples, start=1):
            result = await self._finished(sample, batch.number)
            if not await self.events.sample_finished(replace(result, has_next=place < len(batch.samples))):
                break
        await self.events.batch_finished(batch.number)

    async def _finished(self, sample: Sample, batch_number: int) -> SampleResult:
        """A sample's row, whatever became of it."""
        config = self.settings.config
        try:
            return finished_sample(config, await self.run_sample(sample), sample, batch_number)
        except (RunStoppedError, asyncio.CancelledError):
            await self._hand_on_interrupted(sample, batch_number)
            raise
        except Exception as exc:  # the fence around one sample: its neighbours go on
            logger.exception("sample %d failed", sample.index)
            result = unstarted(config, sample, "crashed", f"{type(exc).__name__}: {exc}")
            return finished_sample(config, result, sample, batch_number)
        finally:
            self._agents.pop(sample.index, None)

    async def _hand_on_interrupted(self, sample: Sample, batch_number: int) -> None:
        """Keep what a conversation that is broken off has cost: it was paid, and counts against the run's limits."""
        agent = self._agents.get(sample.index)
        result = None if agent is None else agent.result
        if result is None or not (result.api_calls or result.usage.reported_calls):
            return
        result.outcome, result.stop_reason = Outcome.INTERRUPTED, "interrupted"
        result.error = "broken off when the run was stopped; it is run again on --resume"
        await self.events.sample_finished(finished_sample(self.settings.config, result, sample, batch_number))

    async def run_sample(self, sample: Sample) -> AgentResult:
        """Run one sample in a sandbox of its own.

        Raises:
            RunStoppedError: no sample of this run can go on.
        """
        config = self.settings.config
        offer = draw_tools(self.settings, sample)
        label = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{config.run_name}-{sample.index}")
        spec = SandboxSpec(label=label, image=sample.image, cwd=sample.cwd)
        try:
            sandbox = new_sandbox(self.settings.sandbox, spec)
            return await self._in_sandbox(sandbox, offer, sample)
        except SandboxError as exc:
            result = unstarted(config, sample)
            record_failure(result, exc)
            return result

    async def _in_sandbox(self, sandbox: Sandbox, offer: ToolOffer, sample: Sample) -> AgentResult:
        try:
            await sandbox.start()
            settings, context = self.settings.config.agent, ToolContext(sandbox)
            agent = Agent(self.client, settings, offer, context, self._observer(sample), self._prices.priced)
            self._agents[sample.index] = agent
            return await agent.run(sample.prompt)
        finally:
            await self._close(sandbox)

    async def _close(self, sandbox: Sandbox) -> None:
        """Remove a sandbox. A conversation that was held is not lost because its folder would not go."""
        try:
            await sandbox.close()
        except (SandboxError, OSError) as exc:
            logger.warning("a sandbox could not be removed: %s", exc)

    def _observer(self, sample: Sample) -> Callable[[str], None]:
        if not self.settings.config.verbose:
            return lambda _line: None
        limit, mask = self.settings.config.log_prefix_chars, mask_of(self.settings.config.secrets)
        return lambda line: self.events.turn(TurnEvent(sample.index, preview(mask.text(line), limit)))


def draw_tools(settings: WorkerSettings, sample: Sample) -> ToolOffer:
    """Draw a sample's toolsets. The same seed, content and occurrence always draw the same."""
    rng = random.Random(f"{settings.config.seed}:{sample.content_hash}:{sample.occurrence}")
    toolsets = sample_toolsets(settings.config.distribution, rng, available=settings.available_toolsets)
    run_tools = frozenset(tool.name for tool in tools_in(settings.available_toolsets))
    return ToolOffer(tuple(toolsets), {tool.name: tool for tool in tools_in(toolsets)}, run_tools)
