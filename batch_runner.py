#!/usr/bin/env python3
"""Run a JSONL dataset of prompts through tool-calling agents, and save their trajectories.

    python batch_runner.py --dataset_file=data/prompts.jsonl --batch_size=10 --run_name=my_run
    python batch_runner.py --dataset_file=data/prompts.jsonl --batch_size=10 --run_name=my_run --resume
    python batch_runner.py --list_distributions

From a script: `from batch_runner import BatchRunner`, then `await BatchRunner(...).run()`.
"""

import sys
from typing import TYPE_CHECKING, Any

from promptmill.door import open_door, print_answer
from promptmill.flags import FLAGS, boolean

if TYPE_CHECKING:
    from promptmill.runner import BatchRunner

__all__ = ["BatchRunner", "main"]

USAGE = "python batch_runner.py --dataset_file=FILE --run_name=NAME [--flag=value ...]"
SUMMARY = "Run a JSONL dataset of prompts through tool-calling agents, and save their trajectories."


def __getattr__(name: str) -> Any:
    """`BatchRunner`, imported when it is asked for: the command's `--help` need not wait for it."""
    if name == "BatchRunner":
        from promptmill.runner import BatchRunner

        return BatchRunner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(
    dataset_file: str | None = None,
    batch_size: int | None = None,
    run_name: str | None = None,
    distribution: str | None = None,
    max_turns: int | None = None,
    num_workers: int | None = None,
    resume: bool | None = None,
    retry: str | None = None,
    accept_changes: bool | None = None,
    start_over: bool | None = None,
    max_samples: int | None = None,
    seed: int | None = None,
    output_dir: str | None = None,
    keep_no_reasoning: bool | None = None,
    engine: str | None = None,
    sandbox: str | None = None,
    verbose: bool | None = None,
    grace_s: float | None = None,
    list_distributions: bool | None = None,
    config: str | None = None,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    request_timeout_s: float | None = None,
    prompt_timeout_s: float | None = None,
    in_flight_limit: str | None = None,
    stream: bool | None = None,
    max_cost_usd: float | None = None,
    max_total_tokens: int | None = None,
    max_duration_s: float | None = None,
    max_failures: int | str | None = None,
    prompt_max_tokens: int | None = None,
    dry_run: int | None = None,
    price_per_mtok: str | None = None,
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
    """Run a batch. Each parameter is the flag of that name, as `--help` describes it; None leaves its default."""
    # As typed: parsed here, `--max_samples=all` would be None, which is to say that nothing was given.
    given = {name: value for name, value in locals().items() if value is not None}
    if boolean("list_distributions", given.pop("list_distributions", False)):
        from toolsets.distributions import describe_distributions

        print_answer(describe_distributions())
        return
    from promptmill.batch_command import run_batch  # after the quick answers, since it imports what a run needs

    sys.exit(run_batch(given))


if __name__ == "__main__":
    open_door(main, sys.argv[1:], FLAGS, USAGE, SUMMARY)
