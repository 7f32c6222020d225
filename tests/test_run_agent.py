"""`AIAgent` for scripts, and `run_agent.py`: one prompt, its steps, its files."""

import asyncio
import signal
from pathlib import Path

import orjson
import pytest

from promptmill.errors import ConfigError, EndpointError, Outcome
from promptmill.rows import DOCUMENTED_KEYS
from run_agent import AIAgent
from tests.fakes.model_server import Answer, RecordedRequest, ScriptedServer, by_turn, call, fail, one_turn, say
from tests.processes import wait_until
from tests.rows import prompts_in, read_jsonl
from tests.test_command import (
    HOSTILE,
    as_flags,
    command,
    processes_of,
    scratch,
    started,
    wait_for_end_of,
    without_openai,
)

__all__ = ["scratch", "without_openai"]  # fixtures

SAVED, FAILED = Path("trajectory_samples.jsonl"), Path("failed_trajectories.jsonl")
ECHO = by_turn(call("terminal", {"command": "echo $((6*7))"}, reasoning="I compute."), say("It is 42."))


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


def agent_for(server: ScriptedServer, **given: object) -> AIAgent:
    return AIAgent(**{"model": "test/model", "base_url": server.base_url, "sandbox": "local"} | given)


# ── from a script ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_conversation_that_completes_is_appended_to_trajectory_samples(server):
    server.script = ECHO
    agent = agent_for(server, save_trajectories=True, skip_context_files=True, skip_memory=True)
    result = await agent.run_conversation("6*7?")
    assert (result.outcome, result.final_response, result.api_calls) == (Outcome.COMPLETED, "It is 42.", 2)
    await agent.run_conversation("again")
    assert prompts_in(SAVED) == ["6*7?", "again"]
    assert not FAILED.exists()
    row = read_jsonl(SAVED)[0]
    assert tuple(row)[: len(DOCUMENTED_KEYS)] == DOCUMENTED_KEYS
    assert [turn["from"] for turn in row["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert orjson.loads(row["conversations"][3]["value"])["output"] == "42"
    assert (row["completed"], row["metadata"]["model"], row["tool_stats"]["terminal"]["success"]) == (
        True,
        "test/model",
        1,
    )


@pytest.mark.parametrize(
    ("script", "stop_reason"),
    [
        (lambda request: fail(400, "no"), "rejected_request"),
        (lambda request: call("terminal", {"command": "true"}), "max_turns"),
        (lambda request: say("cut", finish_reason="length"), "output_cut"),
    ],
    ids=["rejected", "max_turns", "cut"],
)
async def test_a_conversation_that_does_not_complete_is_appended_to_failed_trajectories(server, script, stop_reason):
    server.script = script
    result = await agent_for(server, save_trajectories=True, max_iterations=2).run_conversation("a")
    assert result.stop_reason == stop_reason
    (row,) = read_jsonl(FAILED)
    assert (row["completed"], row["stop_reason"], prompts_in(FAILED)) == (False, stop_reason, ["a"])
    assert not SAVED.exists()


async def test_nothing_is_saved_unless_it_is_asked_for(server, tmp_path):
    await agent_for(server).run_conversation("a")
    assert list(tmp_path.iterdir()) == []


async def test_a_refused_key_is_raised(server):
    server.script = lambda request: fail(401, "bad key")
    with pytest.raises(EndpointError, match="answered 401: bad key"):
        await agent_for(server, save_trajectories=True).run_conversation("a")
    assert not SAVED.exists()


async def test_options_are_those_of_the_batch_by_the_same_names(server):
    agent = agent_for(
        server, max_tokens=7, temperature=0.5, system_prompt="Be brief.", ephemeral_system_prompt="Psst.",
        prefill_messages=[{"role": "user", "content": "hi"}], reasoning_config={"enabled": True, "effort": "low"},
        enabled_toolsets=["file"], api_key="k",
    )  # fmt: skip
    result = await agent.run_conversation("a")
    (request,) = server.requests
    body = request.body
    assert (body["max_tokens"], body["temperature"], body["reasoning_effort"], request.api_key) == (7, 0.5, "low", "k")
    assert [message["content"] for message in body["messages"]] == ["Be brief.\n\nPsst.", "hi", "a"]
    assert request.tool_names == ["read_file", "write_file", "patch", "search_files"]
    assert [message.content for message in result.messages] == ["Be brief.", "a", "answer to a"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"batchsize": 3}, "unknown option 'batchsize'"),
        ({"enabled_toolsets": ["web"]}, "toolset 'web' cannot be used: "),
        ({"enabled_toolsets": ["fiel"]}, "did you mean 'file'"),
        ({"sandbox": "chroot"}, "unknown sandbox 'chroot'"),
        ({"base_url": "https://models.example.org/v1"}, r"no key for models\.example\.org"),
    ],
)
async def test_an_option_that_cannot_be_had_is_refused_by_the_constructor(server, given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        agent_for(server, **given)


async def test_each_step_is_told_while_it_happens(server):
    server.script = ECHO
    steps: list[str] = []
    await agent_for(server, observe=steps.append).run_conversation("6*7?")
    assert steps == [
        "asks    6*7?",
        "thinks  I compute.",
        'calls   terminal {"command": "echo $((6*7))"}',
        'gets    {"output":"42","exit_code":0,"error":null}',
        "says    It is 42.",
        "ends    answer",
    ]


KEY = "sk-agent-0123456789abcdef0123456789abcdef"


async def test_nothing_that_it_returns_tells_or_saves_holds_a_key(server):
    server.script = by_turn(
        call("terminal", {"command": f"echo '{KEY}'"}, reasoning=f"I say {KEY}.", reasoning_details=[{"text": KEY}]),
        call(f"tool_{KEY}", "{" + KEY, id=KEY),
        say(f"It is {KEY}."),
    )
    steps: list[str] = []
    agent = agent_for(server, save_trajectories=True, api_key=KEY, observe=steps.append)
    result = await agent.run_conversation(f"What about {KEY}?")
    assert KEY in str(server.bodies[-1])  # the model is told what the tool said, as in a batch
    assert (result.outcome, result.final_response) == (Outcome.COMPLETED, "It is ***.")
    outputs = [orjson.loads(message.content) for message in result.messages if message.role == "tool"]
    assert outputs[0]["output"] == "***"
    assert result.unknown_tools == ("tool_***",)
    assert all(not message.encoded for message in result.messages)
    assert KEY not in f"{result!r} {steps} {SAVED.read_text()}"
    calls = [entry for message in result.messages for entry in message.tool_calls]
    answered = [message.tool_call_id for message in result.messages if message.role == "tool"]
    assert [entry.id for entry in calls] == answered == ["call_1", "***"]
    assert orjson.loads(calls[0].arguments) == {"command": "echo '***'"}


async def test_an_error_that_it_returns_or_raises_does_not_show_the_key(server):
    server.script = lambda request: fail(400, f"not with {request.api_key}")
    agent = agent_for(server, api_key=KEY)
    assert "answered 400: not with ***" in (await agent.run_conversation("a")).error
    server.script = lambda request: fail(401, f"Incorrect API key provided: {request.api_key}")
    with pytest.raises(EndpointError, match=r"provided: \*\*\*") as caught:
        await agent.run_conversation("a")
    assert caught.value.__suppress_context__


async def test_its_notes_say_what_is_done_otherwise_than_asked(server):
    agent = agent_for(server, reasoning_config={"enabled": True, "effort": "ultra"}, provider_sort="price")
    sandbox, toolsets, *quirks = agent.notes
    assert sandbox.startswith("Sandbox local")
    assert toolsets == "Toolsets left out: web, vision, image_gen, browser (not part of this version)"
    assert any("--reasoning_effort=ultra is sent as 'high'" in note for note in quirks)
    assert any("The provider flags are not sent" in note for note in quirks)
    assert len(agent_for(server, enabled_toolsets=["file"]).notes) == 1


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────


def flags(server: ScriptedServer, **given: object) -> list[str]:
    return as_flags({"prompt": "a", "model": "test/model", "base_url": server.base_url, "sandbox": "local"} | given)


async def test_the_command_prints_the_answer_and_shows_the_steps(server):
    server.script = ECHO
    ended = await command(*flags(server), "--save_trajectories", script="run_agent.py")
    assert (ended.code, ended.stdout) == (0, "It is 42.\n")
    assert 'calls   terminal {"command": "echo $((6*7))"}' in ended.stderr.splitlines()
    assert prompts_in(SAVED) == ["a"]


async def test_the_command_shows_the_notes_whole_and_no_key(server):
    server.script = by_turn(call("terminal", {"command": f"echo {KEY}"}), say(f"It is {KEY}."))
    given = flags(server, api_key=KEY, reasoning_effort="ultra", log_prefix_chars=5)
    ended = await command(*given, script="run_agent.py")
    assert (ended.code, ended.stdout) == (0, "It is ***.\n")
    assert "--reasoning_effort=ultra is sent as 'high': 127.0.0.1 is taken for a server that knows" in ended.stderr
    assert "Toolsets left out: web, vision, image_gen, browser (not part of this version)" in ended.stderr
    assert "Sandbox local: commands run as plain processes of this user" in ended.stderr
    assert KEY not in ended.stderr


async def test_the_command_exits_with_1_when_there_is_no_answer(server):
    server.script = lambda request: fail(400, f"refusing {HOSTILE}")
    ended = await command(*flags(server, save_trajectories="yes"), script="run_agent.py")
    assert (ended.code, ended.stdout) == (1, "")
    assert "error: the conversation ended early: rejected_request" in ended.stderr
    assert "\x1b" not in ended.stderr
    assert prompts_in(FAILED) == ["a"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--prompt="], "--prompt is required"),
        (["--promt=b"], "unknown flag --promt; did you mean --prompt?"),
        (["b"], "'b' is not a flag"),
        (["--max_turns=0"], "--max_turns is 0; it must be between"),
        (["--enabled_toolsets=web"], "toolset 'web' cannot be used"),
        (["--base_url=https://models.example.org/v1"], "no key for models.example.org"),
    ],
)
async def test_the_command_refuses_bad_usage_with_2(server, tmp_path, words, complaint):
    ended = await command(*flags(server), *words, script="run_agent.py")
    assert (ended.code, ended.stdout) == (2, "")
    assert complaint in ended.stderr
    assert (server.count, list(tmp_path.iterdir())) == (0, [])


async def test_the_commands_help_never_imports_openai(without_openai):
    ended = await command("--help", script="run_agent.py", **without_openai)
    assert (ended.code, ended.stderr) == (0, "")
    assert "--enabled_toolsets=A,B" in ended.stdout


async def test_hostile_text_never_reaches_the_terminal_raw(server):
    server.script = lambda request: say(f"first {HOSTILE}\nsecond", reasoning=HOSTILE)
    ended = await command(*flags(server), script="run_agent.py")
    assert ended.code == 0
    assert ended.stdout.splitlines()[-1] == "second"
    assert not {"\x1b", "\x07", "\x9b", "\r", "\x00", "\u202e"} & set(ended.stdout + ended.stderr)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
async def test_a_signal_ends_the_command_and_leaves_nothing_running(server, scratch, number, code):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.turn == 0:
            lasting = {"command": f"exec -a {scratch} sleep 600", "background": True}
            return call("terminal", lasting, reasoning="r")
        held.set()
        await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    async with started(*flags(server), script="run_agent.py", TMPDIR=str(scratch)) as running:
        await running.until(held)
        await wait_until(lambda: f"{scratch} 600" in str(processes_of(scratch)))
        family = processes_of(scratch)
        running.send(number)
        ended = await running.ended()
    assert (ended.code, "Traceback" in ended.stderr) == (code, False)
    await wait_for_end_of(family)
    assert list(scratch.iterdir()) == []
