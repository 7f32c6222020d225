"""A sample's end: what became of it, as the row that will be saved."""

from datetime import datetime

import orjson

from promptmill.agent import opening_messages
from promptmill.config import RunConfig
from promptmill.errors import Outcome
from promptmill.exports.sharegpt import RowFacts, build_row
from promptmill.records import AgentResult, Sample, SampleResult
from promptmill.rows import summarise
from promptmill.secrets import mask_of
from toolsets.catalog import TOOLS

ROW_SETTINGS = (
    "distribution", "max_turns", "max_tokens", "temperature", "top_p", "reasoning_effort", "reasoning_disabled",
)  # fmt: skip
"""Options that a row records; its model, its seed and its system prompt stand in the row themselves."""


def unstarted(config: RunConfig, sample: Sample, stop_reason: str = "not_started", error: str = "") -> AgentResult:
    """A transient failure of a sample whose conversation never began or was lost with its worker."""
    return AgentResult(
        outcome=Outcome.FAILED_TRANSIENT,
        stop_reason=stop_reason,
        messages=opening_messages(config.agent, sample.prompt),
        error=error,
    )


def finished_sample(config: RunConfig, result: AgentResult, sample: Sample, batch_number: int) -> SampleResult:
    """Build and encode the row, secrets masked. A row without any reasoning is marked as discarded, unless kept."""
    settings = {
        name: config.options[name] for name in ROW_SETTINGS if config.options.get(name) not in (None, "", False)
    }
    facts = RowFacts(batch_number, config.model.model, config.seed, tuple(TOOLS), datetime.now(), settings)
    row = build_row(result, sample, facts)
    if result.outcome in (Outcome.COMPLETED, Outcome.PARTIAL) and not (
        row["reasoning_turns"] or config.keep_no_reasoning
    ):
        row |= {"outcome": str(Outcome.DISCARDED), "error": "discarded: no assistant turn has reasoning"}
    encoded = orjson.dumps(row)
    mask = mask_of(config.secrets)
    if mask.suspects(encoded):
        row = mask.value(row)
        encoded = orjson.dumps(row)
    return SampleResult(batch_number, sample.index, encoded, summarise(row))
