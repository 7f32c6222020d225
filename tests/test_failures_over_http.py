"""Every kind of failure over real HTTP, answered whole and streamed: what a call costs, and what a run keeps of it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from promptmill import client
from promptmill.client import ModelClient
from promptmill.errors import (
    ContextFullError,
    EndpointError,
    ModelError,
    Outcome,
    RefusedError,
    RejectedRequestError,
    RunStoppedError,
    TransientModelError,
)
from promptmill.failures import RetryPolicy
from promptmill.records import Message
from tests.fakes.model_server import Script, by_turn, call, drop, fail, one_turn, raw, say
from tests.rows import make_settings
from tests.test_agent_replies import KINDS as REPLIES
from tests.test_agent_replies import LS, REPAIRS, UNUSABLE, WHY
from tests.test_command import RunFiles, as_flags, command, run_inline, run_options

QUICK = RetryPolicy(max_attempts=3, max_refusals=5, first_backoff_s=0.001, max_backoff_s=0.002)

KINDS = {
    "500": (fail(500, "oops"), TransientModelError, 3, 0.0),
    "502 with a page": (raw("<html>bad gateway</html>", status=502), TransientModelError, 3, 0.0),
    "503": (fail(503, "no capacity"), TransientModelError, 3, 0.0),
    "503 that names a time": (fail(503, "busy", headers={"retry-after": "0.05"}), TransientModelError, 5, 0.2),
    "408": (fail(408, "slow"), TransientModelError, 3, 0.0),
    "429": (fail(429, "slow down"), TransientModelError, 5, 0.0),
    "429 in milliseconds": (fail(429, "slow", headers={"retry-after-ms": "40"}), TransientModelError, 5, 0.16),
    "429 per minute": (fail(429, "quota exceeded: requests per minute"), TransientModelError, 5, 0.0),
    "429 exhausted": (fail(429, "You exceeded your current quota"), EndpointError, 1, 0.0),
    "529": (fail(529, "overloaded"), TransientModelError, 5, 0.0),
    "dropped": (drop(), TransientModelError, 3, 0.0),
    "page instead of JSON": (raw("<html>hello</html>"), TransientModelError, 3, 0.0),
    "error inside a 200": (raw('{"error": {"code": 502, "message": "provider down"}}'), TransientModelError, 3, 0.0),
    "no choices": (raw('{"choices": []}'), TransientModelError, 3, 0.0),
    "nothing said": (say(""), RefusedError, 3, 0.0),
    "content filter": (say("", finish_reason="content_filter"), RefusedError, 1, 0.0),
    "400": (fail(400, "messages: bad"), RejectedRequestError, 1, 0.0),
    "400 too long": (fail(400, "maximum context length is 10"), ContextFullError, 1, 0.0),
    "400 no such model": (fail(400, "x is not a valid model ID"), EndpointError, 1, 0.0),
    "413": (fail(413, "too large"), ContextFullError, 1, 0.0),
    "401": (fail(401, "bad key"), EndpointError, 1, 0.0),
    "402": (fail(402, "no credit"), EndpointError, 1, 0.0),
    "403": (fail(403, "forbidden"), EndpointError, 1, 0.0),
    "403 flagged": (fail(403, "flagged by moderation"), RefusedError, 1, 0.0),
    "404": (fail(404, "no such route"), EndpointError, 1, 0.0),
    "307 elsewhere": (fail(307, headers={"location": "http://models.example.org/v1"}), EndpointError, 1, 0.0),
    "307 to nowhere": (fail(307, headers={"location": "http://[::1"}), TransientModelError, 3, 0.0),
    "304": (raw("", status=304), RejectedRequestError, 1, 0.0),
    "400 no credit": (fail(400, "Your credit balance is too low to access the API."), EndpointError, 1, 0.0),
    "400 no key, in a list": (
        raw('[{"error": {"code": 400, "message": "API key not valid. Please pass a valid API key."}}]', status=400),
        EndpointError, 1, 0.0,
    ),
    "400 that quotes": (fail(400, "Invalid message 3: cat: model.py: file not found"), RejectedRequestError, 1, 0.0),
    "403 no credit": (fail(403, "Key limit exceeded (monthly limit)", code=403), EndpointError, 1, 0.0),
    "429 suspended": (fail(429, "no", type="exceeded_current_quota_error"), EndpointError, 1, 0.0),
    "429 per day": (fail(429, "Rate limit exceeded: free-models-per-day. Add 10 credits"), EndpointError, 1, 0.0),
    "429 that says when": (
        fail(429, "You exceeded your current quota. Please retry in 40ms."), TransientModelError, 5, 0.16,
    ),
    "no quota inside a 200": (raw('{"error": {"message": "no", "code": "insufficient_quota"}}'), EndpointError, 1, 0.0),
    "no key inside a 200": (raw('{"error": {"message": "Invalid API key", "code": "401"}}'), EndpointError, 1, 0.0),
    "403 inside a 200": (raw('{"error": {"message": "no", "code": 403}}'), EndpointError, 1, 0.0),
    "404 of a provider": (
        raw('{"error": {"message": "no", "code": 404, "metadata": {"provider_name": "X"}}}'),
        TransientModelError, 3, 0.0,
    ),
    "overload inside a 200": (raw('{"error": {"type": "overloaded_error"}}'), TransientModelError, 5, 0.0),
}  # fmt: skip

ABOUT_THE_PROMPT_LATER = {"403"}
"""The key was good a moment ago."""
OF_A_PROVIDER_LATER = {"403 inside a 200"}
"""The endpoint took the request, and something behind it failed."""

# ── one call ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_failure_costs_what_its_kind_costs(start_server, kind, stream):
    answer, error, requests, least_wait_s = KINDS[kind]
    server = await start_server(lambda request: answer)
    client = ModelClient(make_settings(server.base_url, stream=stream), retries=QUICK)
    started_s = time.monotonic()
    try:
        with pytest.raises(error):
            await client.complete([Message("user", "hello")], ())
    finally:
        await client.close()
    assert len(server.requests) == requests
    assert time.monotonic() - started_s >= least_wait_s
    assert all(request.body.get("stream", False) is stream for request in server.requests)


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class End:
    """What has come of a run of one prompt."""

    file: str
    """Which one the row is in; empty when it is in none."""
    outcome: str = ""
    stop_reason: str = ""
    said: tuple[str, ...] = ()
    """The gpt turns of the row."""
    is_merged: bool = False
    """Whether the row is in `trajectories.jsonl`."""
    requests: int = 0
    pending: int = 0


FILES = ("batch_0.jsonl", "failed.jsonl", "discarded.jsonl")
LOOK = call("terminal", {"command": "true"}, reasoning="I look.")
LOOKED = "<think>\nI look.\n</think>\n"
ENDS: Mapping[type[ModelError], tuple[str, str, str]] = {
    TransientModelError: ("failed.jsonl", "failed_transient", "provider_failed"),
    RefusedError: ("failed.jsonl", "refused", "refused"),
    RejectedRequestError: ("failed.jsonl", "failed_permanent", "rejected_request"),
    ContextFullError: ("failed.jsonl", "failed_permanent", "prompt_too_large"),
}
ATTEMPTS_BY_QUICK = {1: 1, 3: RetryPolicy().max_attempts, 5: RetryPolicy().max_refusals}
"""Requests with `QUICK` -> with the policy of a run."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own waits are for real endpoints."""
    monkeypatch.setattr(client, "RETRIES", replace(RetryPolicy(), first_backoff_s=0.001, max_backoff_s=0.002))


def run_folder(name: str = "run") -> RunFiles:
    return RunFiles(Path("data") / name)


async def end_of(start_server, name: str, script: Script, **given: Any) -> End:
    """Run one prompt, and look into the run folder. What stops the run leaves its prompt pending."""
    server = await start_server(script)
    given = {"run_name": name, "sandbox": "local", "distribution": "terminal_only"} | given
    try:
        await run_inline(server.base_url, None, **given)
        has_stopped = False
    except RunStoppedError:
        has_stopped = True
    run = run_folder(name)
    rows = [(file, row) for file in FILES for row in run.lines(file) if row["outcome"] != "interrupted"]
    assert has_stopped is (run.samples["pending"] > 0)
    assert len(rows) + run.samples["pending"] == 1
    assert run.json("checkpoint.json")["completed_prompts"] == [0 for file, _ in rows if file != "failed.jsonl"]
    assert all(request.body.get("stream", False) is given.get("stream", False) for request in server.requests)
    if not rows:
        return End("", requests=len(server.requests), pending=run.samples["pending"])
    ((file, row),) = rows
    said = tuple(turn["value"] for turn in row["conversations"] if turn["from"] == "gpt")
    return End(file, row["outcome"], row["stop_reason"], said, bool(run.rows), len(server.requests))


async def check_ends(start_server, scripts: Mapping[str, Script], expected: Mapping[str, End], **given: Any) -> None:
    """A run for each script in each transport, all at once: what they wait for is the same few seconds."""
    run_options("", ["go"])
    kinds = [(name, stream) for name in scripts for stream in (False, True)]
    runs = [
        end_of(start_server, f"run_{place}", scripts[name], stream=stream, **given)
        for place, (name, stream) in enumerate(kinds)
    ]
    ends = dict(zip(kinds, await asyncio.gather(*runs), strict=True))
    assert ends == {(name, stream): expected[name] for name, stream in kinds}


async def test_the_row_of_a_prompt_that_fails_at_once_has_no_turn_of_the_models(start_server):
    scripts = {name: by_turn(answer) for name, (answer, *_) in KINDS.items()}
    expected = {}
    for name, (_, error, quick, _) in KINDS.items():
        if error is EndpointError:
            expected[name] = End("", requests=1, pending=1)
        else:
            expected[name] = End(*ENDS[error], requests=ATTEMPTS_BY_QUICK[quick])
    await check_ends(start_server, scripts, expected)


async def test_the_row_of_a_prompt_that_fails_later_keeps_the_turns_before(start_server):
    scripts = {name: by_turn(LOOK, answer) for name, (answer, *_) in KINDS.items()}
    expected = {}
    for name, (_, error, quick, _) in KINDS.items():
        requests = 1 + ATTEMPTS_BY_QUICK[quick]
        if error is ContextFullError:
            expected[name] = End("batch_0.jsonl", "partial", "context_full", (LOOKED,), True, requests)
        elif name in ABOUT_THE_PROMPT_LATER:
            expected[name] = End(*ENDS[RefusedError], (LOOKED,), False, requests)
        elif name in OF_A_PROVIDER_LATER:
            expected[name] = End(*ENDS[TransientModelError], (LOOKED,), False, 1 + RetryPolicy().max_attempts)
        elif error is EndpointError:
            expected[name] = End("", requests=2, pending=1)
        else:
            expected[name] = End(*ENDS[error], (LOOKED,), False, requests)
    await check_ends(start_server, scripts, expected)


@pytest.mark.parametrize(
    "kind",
    [
        name
        for name, (_, error, *_) in KINDS.items()
        if error is EndpointError and name not in ABOUT_THE_PROMPT_LATER | OF_A_PROVIDER_LATER
    ],
)
async def test_what_stops_a_run_leaves_all_that_is_unfinished_pending_and_resume_goes_on(start_server, kind):
    answer, *_ = KINDS[kind]
    server = await start_server(lambda request: answer if request.prompt != "a" else one_turn(request))
    with pytest.raises(EndpointError):
        await run_inline(server.base_url, ["a", "b", "c", "d"], batch_size=1, num_workers=1)
    run = run_folder()
    samples = run.samples
    assert (run.prompts, server.prompts, samples["pending"], samples["failed"]) == (["a"], ["a", "b"], 3, 0)
    assert (run.lines("failed.jsonl"), run.lines("discarded.jsonl")) == ([], [])
    if kind == "401":
        server.script = one_turn
        run = await run_inline(server.base_url, None, resume=True)
        assert (sorted(run.prompts), run.samples["pending"]) == (["a", "b", "c", "d"], 0)


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("401", 1, "error: {url} answered 401: bad key; no key was sent: set HOST_127_0_0_1_API_KEY in"),
        ("404", 1, "error: {url}/chat/completions answered 404: no such route; check --model=test/model and"),
        (
            "307 elsewhere",
            1,
            "error: {url} redirects (307) to another server, http://models.example.org; nothing was sent",
        ),
        ("400", 1, ""),
        ("content filter", 1, ""),
        ("500", 1, ""),
    ],
)
async def test_the_command_exits_with_1_when_a_prompt_fails_or_the_run_stops(start_server, kind, code, said):
    server = await start_server(by_turn(KINDS[kind][0]))
    ended = await command(*as_flags(run_options(server.base_url, ["go"], sandbox="local")))
    assert (ended.code, "Traceback" in ended.stderr) == (code, False), ended.stderr
    assert said.format(url=server.base_url) in ended.stderr


# ── replies ───────────────────────────────────────────────────────────────────────────────────────────────


def end_of_reply(name: str) -> End:
    """What a run makes of a kind of reply; those without reasoning are discarded."""
    kind = REPLIES[name]
    requests = ATTEMPTS_BY_QUICK[kind.requests]
    if kind.outcome not in (Outcome.COMPLETED, Outcome.PARTIAL):
        return End("failed.jsonl", kind.outcome, kind.stop_reason, requests=requests)
    if any(value.startswith("<think>") for value in kind.values):
        return End("batch_0.jsonl", kind.outcome, kind.stop_reason, tuple(kind.values), True, requests)
    return End("discarded.jsonl", "discarded", kind.stop_reason, tuple(kind.values), False, requests)


async def test_each_kind_of_reply_ends_in_its_file(start_server):
    scripts = {name: by_turn(kind.answer) for name, kind in REPLIES.items()}
    await check_ends(start_server, scripts, {name: end_of_reply(name) for name in REPLIES})


async def test_a_conversation_with_any_kind_of_call_ends_in_the_shard_and_is_merged_unless_no_tool_has_the_name(
    start_server,
):
    answers = {name: answer for name, (answer, _) in REPAIRS.items()}
    answers |= {f"arguments {arguments!r}": call("terminal", arguments) for arguments, _ in UNUSABLE}
    unknown = {f"the name {name!r}": call(name, LS) for name in ("termnal", "teleport", "", "functions.teleport")}
    scripts = {name: by_turn(answer, say("done", reasoning="why")) for name, answer in (answers | unknown).items()}
    called = {name: WHY if name == "written as text after reasoning" else "" for name in scripts}
    expected = {
        name: End("batch_0.jsonl", "completed", "answer", (called[name], WHY + "done"), name not in unknown, 2)
        for name in scripts
    }
    await check_ends(start_server, scripts, expected)


# ── an endpoint that is gone ──────────────────────────────────────────────────────────────────────────────


async def test_an_endpoint_that_is_gone_in_the_middle_of_a_run_stops_it_with_the_rest_pending(monkeypatch, caplog):
    monkeypatch.setattr(client, "RETRIES", replace(client.RETRIES, max_outage_s=0.2))
    answer = say("done", reasoning="why").body
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer)
    asked = 0

    async def answer_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if asked < 3:
            writer.write(head + answer)
            await writer.drain()
        else:
            server.close()
        writer.close()

    server = await asyncio.start_server(answer_twice, "127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match=r"has not answered for 0\.2 s .*with --resume"):
        await run_inline(base_url, list("abcdefgh"), batch_size=1, num_workers=1)
    run = run_folder()
    assert (run.prompts, run.samples["failed"], run.samples["pending"]) == (["a", "b"], 0, 6)
    assert [line for line in caplog.messages if "does not answer" in line] == [
        f"{base_url} does not answer; waiting up to 0.2 s"
    ]


# ── what the model wrote all the same ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "answer",
    [
        say("PART", reasoning="THOUGHT", finish_reason="content_filter"),
        say(None, reasoning="THOUGHT", refusal="x" * 400 + "PART"),
        say("", reasoning="THOUGHT PART"),
    ],
    ids=["filtered", "refused", "only reasoning"],
)
async def test_what_the_model_wrote_is_in_the_error_of_a_failed_row_and_in_no_turn(start_server, answer):
    server = await start_server(lambda request: answer)
    run = await run_inline(server.base_url, ["a"])
    (row,) = run.lines("failed.jsonl")
    assert "; it had written: <think>\nTHOUGHT" in row["error"]
    assert "PART" in row["error"]
    assert [turn["from"] for turn in row["conversations"]] == ["system", "human"]
