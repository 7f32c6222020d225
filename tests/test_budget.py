"""Limits on a whole run: they keep prompts from starting, over all starts, and let finish what is in flight."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from promptmill.budget import Budget, Spent, duration_of, settled_starts
from promptmill.config import Limits
from promptmill.errors import EndpointError, LimitReachedError
from tests.fakes.model_server import Answer, RecordedRequest, ScriptedServer, call, fail, one_turn, say
from tests.rows import make_summary
from tests.test_command import RunFiles, as_flags, command, run_inline, run_options, started
from tests.test_engines import KILL_THE_WORKER

PRICE_USD = 0.01


def usage(calls: int = 1, *, cost_usd: float = PRICE_USD, priced: int | None = None) -> dict[str, Any]:
    return {
        "prompt_tokens": 100 * calls, "completion_tokens": 10 * calls, "reported_calls": calls,
        "cost_usd": cost_usd * calls, "priced_calls": calls if priced is None else priced,
    }  # fmt: skip


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def budget(elapsed_before_s: float = 0.0, clock: Clock | None = None, **limits: Any) -> Budget:
    return Budget(Limits(**limits), Spent(), elapsed_before_s, clock or Clock())


def end(one: Budget, batch_number: int = 0, **changes: Any) -> None:
    one.ended(batch_number, make_summary(**{"usage": usage(), "duration_s": 2.0, **changes}))


# ── the decision ──────────────────────────────────────────────────────────────────────────────────────────


def test_without_limits_everything_may_start():
    assert all(budget().may_start(number) for number in range(1000))


def test_what_is_in_flight_counts_as_the_mean_so_far():
    one = budget(max_cost_usd=0.05)
    assert one.may_start(0)
    end(one)
    assert [one.may_start(number) for number in range(6)] == [True, True, True, True, False, False]
    assert one.stopped == "--max_cost_usd=0.05 is reached: $0.0100 for 1 prompt, 4 more in flight"


def test_the_last_prompt_that_fits_exactly_may_start():
    one = budget(max_cost_usd=0.1)
    for _ in range(10):
        assert one.may_start(0)
        end(one)
    assert not one.may_start(0)


def test_once_stopped_it_stays_stopped():
    one = budget(max_cost_usd=0.05)
    one.may_start(0)
    end(one, usage=usage(cost_usd=0.04))
    assert not one.may_start(0)
    end(one, usage=usage(cost_usd=0.0))
    assert not one.may_start(0)


def test_a_batch_whose_worker_died_is_in_flight_once():
    one = budget(max_total_tokens=330)
    one.may_start(0)
    end(one)
    assert [one.may_start(7) for _ in range(5)] == [True] * 5


def test_a_batch_that_is_not_run_any_further_is_in_flight_no_more():
    one = budget(max_total_tokens=330)
    one.may_start(0)
    end(one)
    assert [one.may_start(7), one.in_flight] == [True, 1]
    one.let_go(7)
    one.let_go(8)
    assert [one.in_flight, one.may_start(8), one.may_start(9)] == [0, True, True]


def test_calls_without_a_cost_are_taken_to_cost_the_mean_of_the_others():
    one = budget(max_cost_usd=0.05)
    one.may_start(0)
    end(one, api_calls=4, usage=usage(4, cost_usd=PRICE_USD / 2, priced=2))
    assert one.spent.cost_usd == pytest.approx(0.04)
    assert not one.may_start(0)


def test_prompts_that_never_called_the_model_do_not_lower_the_mean():
    one = budget(max_cost_usd=0.05)
    one.may_start(0)
    end(one, usage=usage(cost_usd=0.03))
    for _ in range(9):
        end(one, api_calls=0, usage=usage(0))
    assert not one.may_start(0)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"max_cost_usd": 1}, "--max_cost_usd=1 cannot be kept: .*tells what calls cost"),
        ({"max_total_tokens": 9}, "--max_total_tokens=9 cannot be kept: the endpoint does not report tokens"),
    ],
)
def test_a_limit_that_cannot_be_kept_stops_the_run(limit, said):
    one = budget(**limit)
    assert one.may_start(0)
    end(one, usage=usage(0))
    assert not one.may_start(0)
    assert re.match(said, one.stopped)


def test_time_counts_former_starts_and_the_prompt_itself():
    clock = Clock()
    one = budget(50.0, clock, max_duration_s=60)
    assert one.may_start(0)
    end(one)
    clock.now_s += 7.5
    assert one.may_start(0)
    clock.now_s += 1.0
    assert not one.may_start(1)
    assert one.stopped == "--max_duration_s=60 is reached: 58.5 s, and a prompt takes 2.0 s"


def test_a_number_of_failures_is_what_is_tolerated():
    one = budget(max_failures=2)
    for reason in ("refused", "rejected_request", "refused"):
        assert one.may_start(0)
        end(one)
        end(one, outcome="failed_permanent", stop_reason=reason)
    assert not one.may_start(0)
    said = "--max_failures=2 is passed: 3 prompts of this start failed, 2 of them with 'refused' (see failed.jsonl)"
    assert one.stopped == said


def test_a_percentage_of_failures_is_of_the_last_100_prompts():
    one = budget(max_failures="10%")
    failed = {"outcome": "failed_transient", "stop_reason": "provider_failed"}
    for _ in range(2):
        end(one, **failed)
    for _ in range(100):
        assert one.may_start(0)
        end(one)
    for _ in range(10):
        end(one, **failed)
        assert one.may_start(0)
    end(one, **failed)
    assert not one.may_start(0)
    assert one.stopped.startswith("--max_failures=10% is passed: 11 of the last 100 prompts failed")


def test_a_percentage_of_failures_is_not_judged_before_the_20th_prompt():
    one = budget(max_failures="50%")
    for _ in range(20):
        assert one.may_start(0)
        end(one, outcome="failed_transient", stop_reason="provider_failed")
    assert not one.may_start(0)


def test_a_killed_start_lasted_until_its_last_row():
    starts = [
        {"started_at": "2026-01-30T10:00:00.000000", "duration_s": 5.0},
        {"started_at": "2026-01-30T11:00:00.000000", "duration_s": 0.0},
    ]
    settled = settled_starts(starts, "2026-01-30T11:00:07.500000")
    assert [start["duration_s"] for start in settled] == [5.0, 7.5]
    assert duration_of(settled) == 12.5
    assert settled_starts(starts, "2026-01-30T10:30:00.000000")[1]["duration_s"] == 0.0
    assert settled_starts(starts, "")[1]["duration_s"] == 0.0
    assert settled_starts("damaged", "") == []


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────────────


def paid(request: RecordedRequest) -> Answer:
    """Answer at once, for a cent."""
    cost = {"prompt_tokens": 100, "completion_tokens": 10, "cost": PRICE_USD}
    return say(f"answer to {request.prompt}", reasoning="r", usage=cost)


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    return await start_server(paid)


PROMPTS = [f"prompt {n}" for n in range(20)]


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_a_cost_limit_is_kept_over_resumes_and_lifted_by_none(server, engine):
    options = run_options(server.base_url, PROMPTS, engine=engine, num_workers=1, max_cost_usd=0.05)
    ended = await command(*as_flags(options))
    assert (ended.code, server.count) == (1, 5), ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        "error: --max_cost_usd=0.05 is reached: $0.0500 for 5 prompts; 15 prompts left pending: "
        "with a higher limit, --resume goes on"
    )
    assert RunFiles(Path("data/run")).samples["pending"] == 15
    options.pop("max_cost_usd")
    ended = await command(*as_flags(options), "--resume")
    assert (ended.code, server.count) == (1, 5)
    assert "Former starts spent $0.0500, 550 tokens and " in ended.stderr
    ended = await command(*as_flags(options), "--resume", "--max_cost_usd=0.08")
    assert (ended.code, server.count) == (1, 8)
    ended = await command(*as_flags(options), "--resume", "--max_cost_usd=none")
    assert (ended.code, server.count) == (0, 20)
    assert server.prompts == PROMPTS


async def test_a_limit_stops_within_a_batch_that_a_worker_holds_and_lets_the_others_finish(start_server):
    others_wait = asyncio.Event()

    async def answer(request: RecordedRequest) -> Answer:
        if request.prompt in ("prompt 0", "prompt 4", "prompt 8"):
            if server.in_flight == 3:
                others_wait.set()
            await others_wait.wait()
        return paid(request)

    server = await start_server(answer)
    with pytest.raises(LimitReachedError, match=r"\$0\.0\d+ for \d+ prompts"):
        await run_inline(
            server.base_url, PROMPTS[:12], batch_size=4, num_workers=3, max_cost_usd=0.06, engine="processes"
        )
    assert server.count == 6
    assert RunFiles(Path("data/run")).samples["completed"] == 6


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_the_spend_stays_within_what_was_in_flight_when_a_run_is_killed_twice(server, engine):
    workers, cap_usd = 2, 0.12
    options = run_options(
        server.base_url, PROMPTS * 3, engine=engine, num_workers=workers, batch_size=1, max_cost_usd=cap_usd
    )
    paid_calls = 0
    for kill in range(2):
        reached = asyncio.Event()

        async def answer(
            request: RecordedRequest, last: int = 4 * (kill + 1), reached: asyncio.Event = reached
        ) -> Answer:
            if request.number >= last:
                reached.set()
                await asyncio.Event().wait()
            return paid(request)

        server.script = answer
        async with started(*as_flags(options), *(["--resume"] if kill else [])) as running:
            await running.until(reached)
            running.send(signal.SIGKILL)
            await running.ended()
        paid_calls = server.count
    server.script = paid
    ended = await command(*as_flags(options), "--resume")
    assert ended.code == 1
    assert "--max_cost_usd=0.12 is reached" in ended.stderr
    assert server.count > paid_calls
    assert server.count * PRICE_USD <= cap_usd + 3 * workers * PRICE_USD
    assert RunFiles(Path("data/run")).json("statistics.json")["cost"]["usd"] <= cap_usd + workers * PRICE_USD


async def test_a_cost_limit_without_any_known_cost_stops_after_what_was_in_flight(start_server):
    server = await start_server(one_turn)
    with pytest.raises(LimitReachedError, match="cannot be kept"):
        await run_inline(server.base_url, PROMPTS, num_workers=1, max_cost_usd=1)
    assert server.count == 1


async def test_time_is_counted_over_resumes(start_server):
    server = await start_server(one_turn)
    server.delay_s = 0.3
    with pytest.raises(LimitReachedError, match=r"--max_duration_s=3 is reached"):
        await run_inline(server.base_url, PROMPTS, num_workers=1, max_duration_s=3)
    called = server.count
    assert 0 < called < len(PROMPTS)
    with pytest.raises(LimitReachedError):
        await run_inline(server.base_url, num_workers=1, resume=True)
    assert server.count <= called + 1


async def test_a_refused_prompt_was_paid_too_and_counts_on_resume(start_server):
    refused = say(None, finish_reason="content_filter", usage={"prompt_tokens": 100, "cost": PRICE_USD})
    server = await start_server(lambda request: refused)
    for resume in (False, True):
        with pytest.raises(LimitReachedError, match=r"\$0\.0300 for 3 prompts"):
            await run_inline(server.base_url, PROMPTS, num_workers=1, max_cost_usd=0.03, resume=resume)
    assert server.count == 3
    run = RunFiles(Path("data/run"))
    assert [row["usage"]["cost_usd"] for row in run.lines("failed.jsonl")] == [PRICE_USD] * 3
    assert run.json("statistics.json")["cost"]["usd"] == pytest.approx(3 * PRICE_USD)


async def test_max_failures_leaves_the_rest_pending(start_server):
    server = await start_server(lambda request: fail(400))
    with pytest.raises(LimitReachedError, match=r"--max_failures=3 is passed: 4 .*'rejected_request'.*16 prompts left"):
        await run_inline(server.base_url, PROMPTS, num_workers=1, max_failures=3)
    assert server.count == 4
    assert len(RunFiles(Path("data/run")).lines("failed.jsonl")) == 4


async def test_a_run_that_stays_within_its_limits_ends_with_0(server):
    limits = {"max_cost_usd": 1, "max_total_tokens": 10**6, "max_duration_s": 600, "max_failures": "50%"}
    ended = await command(*as_flags(run_options(server.base_url, PROMPTS, **limits)))
    assert (ended.code, server.count) == (0, 20), ended.stderr


async def test_a_worker_that_dies_under_a_limit_does_not_end_the_run(server):
    kills = iter(["prompt 3"])

    def answer(request: RecordedRequest) -> Answer:
        if request.prompt == "prompt 3" and next(kills, None):
            return call("terminal", {"command": KILL_THE_WORKER}, reasoning="r")
        return paid(request)

    server.script = answer
    with pytest.raises(LimitReachedError, match=r"--max_cost_usd=0\.15 is reached: \$0\.1500 for 15 prompts"):
        await run_inline(
            server.base_url, PROMPTS, engine="processes", num_workers=1, max_cost_usd=0.15, sandbox="local",
            distribution="terminal_only",
        )  # fmt: skip
    assert server.count == 16


def dear(request: RecordedRequest) -> Answer:
    """A tool call for ever, a cent each."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.01}
    return call("terminal", {"command": "true"}, reasoning="r", usage=usage)


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_what_an_interrupted_prompt_has_cost_is_kept_and_counts_on_resume(start_server, engine):
    third = asyncio.Event()

    async def answer(request: RecordedRequest) -> Answer:
        if request.turn == 2:
            third.set()
            await asyncio.Event().wait()
        return dear(request)

    server = await start_server(answer)
    options = run_options(server.base_url, ["a", "b"], engine=engine, batch_size=1, grace_s=0, sandbox="local")
    async with started(*as_flags(options), "--max_cost_usd=5") as running:
        await running.until(third)
        running.send(signal.SIGINT)
        ended = await running.ended()
    assert ended.code == 130
    run = RunFiles(Path("data/run"))
    rows = run.lines("failed.jsonl")
    answered = sum(row["api_calls"] for row in rows)
    assert answered >= 2
    assert {row["outcome"] for row in rows} == {"interrupted"}
    statistics = run.json("statistics.json")
    assert statistics["cost"]["usd"] == pytest.approx(answered * PRICE_USD)
    assert (statistics["samples"]["pending"], statistics["samples"]["failed"]) == (2, 0)
    assert run.json("checkpoint.json")["completed_prompts"] == []
    server.script = paid
    ended = await command(*as_flags(options), "--resume", "--max_cost_usd=5")
    assert f"Former starts spent ${answered * PRICE_USD:.4f}" in ended.stderr
    assert (ended.code, sorted(run.prompts)) == (0, ["a", "b"])
    assert run.samples["failed"] == 0
    assert {row["attempt"] for row in run.rows} <= {1, 2}


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_a_run_that_is_refused_credit_counts_what_its_conversations_have_cost(start_server, engine):
    server = await start_server(lambda request: fail(402, "no credit") if request.number > 6 else dear(request))
    with pytest.raises(EndpointError):
        await run_inline(server.base_url, list("abcd"), engine=engine, batch_size=1, sandbox="local")
    statistics = RunFiles(Path("data/run")).json("statistics.json")
    assert statistics["samples"]["pending"] == 4
    assert statistics["cost"]["usd"] == pytest.approx(6 * PRICE_USD, abs=2 * PRICE_USD)
