"""The one-prompt command between its door and AIAgent: what is printed, how it exits."""

import asyncio
import signal
import sys
from collections.abc import Mapping
from typing import Any

from promptmill.conversation import AIAgent
from promptmill.door import BAD_USAGE, DONE, INCOMPLETE, complain, print_answer
from promptmill.errors import ConfigError, Outcome, RunStoppedError, UsageError
from promptmill.escaping import escaped, preview
from promptmill.event_loop import run_in_loop
from promptmill.records import AgentResult
from toolsets.sandboxes.base import SandboxError


def run_conversation(given: Mapping[str, Any]) -> int:
    """Run one prompt, print its steps to stderr and its answer to stdout; returns the exit code."""
    options = dict(given)
    prompt, limit = options.pop("prompt", ""), options.pop("log_prefix_chars", None)
    options["max_iterations"] = options.pop("max_turns", 10)

    def observe(line: str) -> None:
        print(escaped(line if limit is None else preview(line, limit)), file=sys.stderr, flush=True)

    try:
        if not prompt:
            raise ConfigError("--prompt is required; see --help")
        agent = AIAgent(observe=observe, **options)
        for note in agent.notes:
            print(escaped(note), file=sys.stderr, flush=True)
        result = run_in_loop(_until_terminated(agent, prompt))
    except UsageError as exc:
        return complain(exc, BAD_USAGE)
    except (RunStoppedError, SandboxError) as exc:
        return complain(exc, INCOMPLETE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    if result.outcome is not Outcome.COMPLETED:
        return complain(RuntimeError(f"the conversation ended early: {result.stop_reason} {result.error}"), INCOMPLETE)
    print_answer("\n".join(escaped(line) for line in result.final_response.split("\n")))
    return DONE


async def _until_terminated(agent: AIAgent, prompt: str) -> AgentResult:
    """Hold the conversation; SIGTERM cancels it, as SIGINT does, so that its sandbox is closed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await agent.run_conversation(prompt)
