#!/usr/bin/env python3
"""Run one prompt through an agent, for trying things.

    python run_agent.py --prompt="What is in this folder?" --model=local

From a script: `from run_agent import AIAgent`, then `await AIAgent(...).run_conversation(prompt)`.
"""

import sys
from typing import TYPE_CHECKING, Any

from promptmill.door import open_door, parsed_options
from promptmill.flags import AGENT_FLAGS

if TYPE_CHECKING:
    from promptmill.conversation import AIAgent

__all__ = ["AIAgent", "main"]

USAGE = "python run_agent.py --prompt=TEXT [--flag=value ...]"
SUMMARY = "Run one prompt through an agent in a sandbox of its own, and print each step."


def __getattr__(name: str) -> Any:
    """`AIAgent`, imported when it is asked for: the command's `--help` need not wait for it."""
    if name == "AIAgent":
        from promptmill.conversation import AIAgent

        return AIAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(
    prompt: str | None = None,
    enabled_toolsets: str | None = None,
    save_trajectories: bool | None = None,
    max_turns: int | None = None,
    sandbox: str | None = None,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    request_timeout_s: float | None = None,
    prompt_timeout_s: float | None = None,
    stream: bool | None = None,
    providers_allowed: str | None = None,
    providers_ignored: str | None = None,
    providers_order: str | None = None,
    provider_sort: str | None = None,
    reasoning_effort: str | None = None,
    reasoning_disabled: bool | None = None,
    system_prompt: str | None = None,
    ephemeral_system_prompt: str | None = None,
    prefill_messages_file: str | None = None,
    log_prefix_chars: int | None = None,
) -> None:
    """Run a prompt. Each parameter is the flag of that name, as `--help` describes it; None leaves its default."""
    given = parsed_options(locals(), {flag.name: flag for flag in AGENT_FLAGS})
    from promptmill.agent_command import run_conversation  # after the quick answers, since it imports what a run needs

    sys.exit(run_conversation(given))


if __name__ == "__main__":
    open_door(main, sys.argv[1:], AGENT_FLAGS, USAGE, SUMMARY)
