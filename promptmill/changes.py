"""What a resume may not change in passing: the settings that decide what rows look like.

Workers, timeouts, limits and the endpoint's address may be others with each start; a model, a prompt, a distribution or
a sampling setting must be accepted, so that no file mixes two kinds of rows by a slip.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import orjson

from promptmill.config import ALIAS_ON_OPENROUTER, RunConfig
from promptmill.records import Message
from toolsets.text import shortened

SHAPING_FLAGS = (
    "model", "distribution", "seed", "temperature", "top_p", "reasoning_effort", "reasoning_disabled",
    "system_prompt", "ephemeral_system_prompt",
)  # fmt: skip
MAX_SHOWN = 60


def changed_settings(run_json: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The settings that differ from those of the run, each as a phrase; what `run.json` does not say is no change."""
    own = run_json.get("options")
    own = own if isinstance(own, dict) else {}
    changes = [
        f"--{name}={_shown(config.options[name])} (it was {_shown(own[name])})"
        for name in SHAPING_FLAGS
        if name in own and _comparable(own[name]) != _comparable(config.options[name])
    ]
    former = run_json.get("prefill_sha256")
    if isinstance(former, str) and former != prefill_digest(config.agent.prefill_messages):
        changes.append("other prefill messages")
    return changes


def prefill_digest(messages: tuple[Message, ...]) -> str:
    """What prefill messages are known by, since they themselves are never saved; empty for none."""
    if not messages:
        return ""
    return sha256(orjson.dumps([(message.role, message.content) for message in messages])).hexdigest()


def _comparable(value: Any) -> Any:
    return ALIAS_ON_OPENROUTER.get(value, value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if value in (None, ""):
        return "the default" if value is None else "empty"
    if not isinstance(value, str):
        return str(value)
    shown = shortened(value, MAX_SHOWN)
    return repr(shown if shown == value else f"{shown}…")
