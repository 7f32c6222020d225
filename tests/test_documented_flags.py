"""Every documented flag, by the exact wire field, row value, file or line that it changes.

A flag without a test here fails `test_every_flag_is_shown_to_do_what_it_says`.
"""

import asyncio
import inspect
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

import batch_runner
from promptmill.config import DEFAULT_SYSTEM_PROMPT
from promptmill.endpoints import NO_KEY
from promptmill.errors import ConfigError, LimitReachedError
from promptmill.flags import FLAG_BY_NAME, FLAGS, REASONING_EFFORTS
from promptmill.runner import BatchRunner
from tests.fakes.model_server import (
    Answer,
    RecordedRequest,
    ScriptedServer,
    by_turn,
    call,
    fail,
    no_reasoning,
    one_turn,
    say,
)
from tests.rows import write_dataset
from tests.test_command import as_flags, command, run_inline, run_options, started
from toolsets.distributions import describe_distributions
from toolsets.sandboxes import sandbox_class

OPENROUTER = "http://openrouter.ai/api/v1"
"""Over plain HTTP, so that the scripted server can be its proxy."""

Test = TypeVar("Test", bound=Callable[..., Any])
SHOWN: set[str] = set()
"""Flags that some test here is about."""


def shows(*names: str) -> Callable[[Test], Test]:
    """Say which flags a test is about."""

    def mark(test: Test) -> Test:
        SHOWN.update(names)
        return test

    return mark


def test_every_flag_is_shown_to_do_what_it_says():
    assert set(FLAG_BY_NAME) == SHOWN


def test_the_commands_function_has_exactly_the_flags():
    parameters = inspect.signature(batch_runner.main).parameters.values()
    assert {parameter.name for parameter in parameters} == set(FLAG_BY_NAME)
    assert [parameter.default for parameter in parameters] == [None] * len(FLAGS)


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


@pytest.fixture
async def proxy(server, monkeypatch) -> ScriptedServer:
    """The server, which every plain-HTTP host of the world is now reached through."""
    monkeypatch.setenv("HTTP_PROXY", server.proxy_url)
    return server


# ── all at once, as typed ─────────────────────────────────────────────────────────────────────────────────


async def test_every_flag_that_is_typed_reaches_the_run(server, tmp_path):
    prefill = tmp_path / "prefill.json"
    prefill.write_text('[{"role": "user", "content": "hi"}]')
    typed = {
        "dataset_file": str(write_dataset(tmp_path, ["a"])), "batch_size": "7", "run_name": "2024_01",
        "distribution": "terminal_only", "max_turns": "3", "num_workers": "2", "max_samples": "1", "seed": "9",
        "output_dir": "1e5", "keep_no_reasoning": "Yes", "engine": "inline", "sandbox": "local",
        "model": "null", "base_url": server.base_url, "max_tokens": "5", "temperature": "0.5", "top_p": "1",
        "stream": "no", "request_timeout_s": "30", "prompt_timeout_s": "60", "in_flight_limit": "2",
        "max_cost_usd": "9.5", "max_total_tokens": "9000", "max_duration_s": "900", "max_failures": "10%",
        "dry_run": "1", "prompt_max_tokens": "8000", "price_per_mtok": "3,15",
        "providers_allowed": "a,b", "providers_ignored": "c", "providers_order": "b,a", "provider_sort": "price",
        "reasoning_effort": "LOW", "reasoning_disabled": "no", "system_prompt": "(1,)", "ephemeral_system_prompt": "{}",
        "prefill_messages_file": str(prefill), "log_prefix_chars": "0",
    }  # fmt: skip
    kept_elsewhere = {"resume": "0", "verbose": "TRUE", "list_distributions": "false", "config": "", "api_key": "0x1"}
    kept_elsewhere |= {"grace_s": "2.5", "retry": "failed", "accept_changes": "no", "start_over": "no"}
    assert set(typed | kept_elsewhere) == set(FLAG_BY_NAME)
    ended = await command(*as_flags(typed | kept_elsewhere))
    assert ended.code == 0, ended.stderr
    assert "[0] says" in ended.stderr
    kept = orjson.loads(Path("1e5/2024_01/run.json").read_bytes())["options"]
    del typed["dry_run"]  # of one start, not of the run
    assert kept == typed | {
        "batch_size": 7, "max_turns": 3, "num_workers": 2, "max_samples": 1, "seed": 9, "keep_no_reasoning": True,
        "max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "providers_allowed": ["a", "b"],
        "max_cost_usd": 9.5, "max_total_tokens": 9000, "max_duration_s": 900.0, "prompt_max_tokens": 8000,
        "price_per_mtok": [3.0, 15.0],
        "providers_ignored": ["c"], "providers_order": ["b", "a"], "reasoning_effort": "low",
        "reasoning_disabled": False, "log_prefix_chars": 0, "stream": False, "request_timeout_s": 30.0,
        "prompt_timeout_s": 60.0, "in_flight_limit": 2,
    }  # fmt: skip
    assert (server.requests[0].api_key, server.requests[0].body["model"]) == ("0x1", "null")


@shows("request_timeout_s")
async def test_request_timeout_s_fails_a_prompt_whose_answer_does_not_come(server):
    server.script = lambda request: say("late", delay_s=30)
    run = await run_inline(server.base_url, ["a"], request_timeout_s=0.3)
    (failed,) = run.lines("failed.jsonl")
    assert (failed["outcome"], failed["stop_reason"]) == ("failed_transient", "provider_failed")
    assert "within 0.3 s" in failed["error"]


@shows("prompt_timeout_s")
async def test_prompt_timeout_s_ends_a_tool_and_keeps_the_conversation(server):
    server.script = lambda request: call("terminal", {"command": "sleep 300"}, reasoning="I wait.")
    started_s = time.monotonic()
    run = await run_inline(server.base_url, ["a"], prompt_timeout_s=1.5, keep_no_reasoning=True)
    assert time.monotonic() - started_s < 60
    (row,) = run.rows
    assert (row["outcome"], row["partial"], row["stop_reason"]) == ("partial", True, "prompt_timeout")
    asked, told = row["conversations"][-2:]
    assert (asked["tool_calls"][0]["id"], "not finished" in told["value"]) == (told["tool_call_id"], True)


async def most_in_service(server, **given):
    """The most requests at once that the server saw; it waits for that many before it answers any."""
    await run_inline(server.base_url, [f"prompt {n}" for n in range(12)], batch_size=1, num_workers=6, **given)
    return server.max_in_flight


@shows("in_flight_limit")
@pytest.mark.parametrize(("limit", "most"), [("2", 2), ("off", 6), ("adaptive", 6)])
async def test_in_flight_limit_bounds_the_requests_at_once(server, limit, most):
    server.script = lambda request: say("hi", reasoning="so", delay_s=0.2)
    assert await most_in_service(server, in_flight_limit=limit) == most


# ── the run ───────────────────────────────────────────────────────────────────────────────────────────────


@shows("dataset_file")
async def test_dataset_file_is_what_is_run(server, tmp_path):
    path = write_dataset(tmp_path / "elsewhere", ["of the file"], name="1e5")
    run = await run_inline(server.base_url, dataset_file=str(path))
    assert (run.prompts, server.prompts) == (["of the file"], ["of the file"])
    assert run.json("run.json")["dataset"]["path"] == str(path)


@shows("batch_size")
async def test_batch_size_is_how_many_prompts_a_shard_has(server):
    run = await run_inline(server.base_url, list("abcde"), batch_size=2)
    assert run.shards == {"batch_0.jsonl": ["a", "b"], "batch_1.jsonl": ["c", "d"], "batch_2.jsonl": ["e"]}
    assert [row["metadata"]["batch_num"] for row in run.rows] == [0, 0, 1, 1, 2]


async def test_batch_size_omitted_means_10_and_the_start_says_so(server, capsys):
    run = await run_inline(server.base_url, [f"prompt {n}" for n in range(11)])
    assert [len(prompts) for prompts in run.shards.values()] == [10, 1]
    assert "11 prompts in 2 batches of 10 (the default; --batch_size changes it)" in capsys.readouterr().err


@shows("run_name", "output_dir")
async def test_run_name_and_output_dir_are_where_the_files_are(server):
    run = await run_inline(server.base_url, ["a"], run_name="007", output_dir="of mine/1e5")
    assert run.path == Path("of mine/1e5/007")
    assert sorted(path.name for path in run.path.iterdir() if not path.name.startswith(".")) == [
        "batch_0.jsonl", "checkpoint.json", "run.json", "run.log", "statistics.json", "trajectories.jsonl",
    ]  # fmt: skip
    assert {run.json(name)["run_name"] for name in ("checkpoint.json", "run.json", "statistics.json")} == {"007"}
    assert not Path("data").exists()


async def test_output_dir_omitted_means_data(server):
    await run_inline(server.base_url, ["a"], run_name="my_run")
    assert Path("data/my_run/trajectories.jsonl").exists()


@shows("distribution")
async def test_distribution_is_what_tools_are_drawn_from(server):
    prompts = [f"prompt {n}" for n in range(12)]
    always = await run_inline(server.base_url, prompts, distribution="terminal_only", run_name="always")
    assert {tuple(row["toolsets_used"]) for row in always.rows} == {("terminal", "file")}
    offered = ["terminal", "process", "read_file", "write_file", "patch", "search_files"]
    assert server.requests[0].tool_names == offered
    drawn = await run_inline(server.base_url, distribution="development", run_name="drawn")
    assert {tuple(row["toolsets_used"]) for row in drawn.rows} == {("terminal", "file"), ("terminal",), ("file",)}
    by_prompt = {request.prompt: request.tool_names for request in list(server.requests)[12:]}
    for row in drawn.rows:
        tools = [tool["function"]["name"] for tool in orjson.loads(row["tools"])]
        assert by_prompt[row["conversations"][1]["value"]] == tools


async def test_distribution_with_nothing_usable_is_refused_before_any_call(server):
    with pytest.raises(ConfigError, match="--distribution=minimal: .*no toolset that can be used here: web"):
        await run_inline(server.base_url, ["a"], distribution="minimal")
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        await run_inline(server.base_url, distribution="defualt")
    assert (server.count, Path("data").exists()) == (0, False)


@shows("max_turns")
@pytest.mark.parametrize(("given", "turns"), [({}, 10), ({"max_turns": 2}, 2)])
async def test_max_turns_is_the_most_model_calls_of_a_prompt(server, given, turns):
    server.script = lambda request: call("terminal", {"command": "true"}, reasoning="again")
    row = (await run_inline(server.base_url, ["a"], sandbox="local", **given)).row
    assert (server.count, row["api_calls"], row["tool_stats"]["terminal"]["count"]) == (turns, turns, turns)
    assert (row["completed"], row["partial"], row["stop_reason"]) == (False, True, "max_turns")


@shows("num_workers")
@pytest.mark.parametrize(("given", "workers"), [({}, 4), ({"num_workers": 3}, 3)])
async def test_num_workers_is_how_many_batches_are_in_flight(server, given, workers):
    all_there = asyncio.Event()

    async def answer_when_all_are_there(request: RecordedRequest) -> Answer:
        if server.in_flight == workers:
            all_there.set()
        await all_there.wait()
        return one_turn(request)

    server.script = answer_when_all_are_there
    async with asyncio.timeout(30):
        await run_inline(server.base_url, [f"prompt {n}" for n in range(9)], batch_size=1, **given)
    assert server.max_in_flight == workers


@shows("resume")
async def test_resume_runs_only_what_is_not_done(server, capsys):
    await run_inline(server.base_url, ["a", "b"])
    run = await run_inline(server.base_url, ["a", "b", "c"], resume=True)
    assert server.prompts == ["a", "b", "c"]
    assert run.shards == {"batch_0.jsonl": ["a", "b"], "batch_1.jsonl": ["c"]}
    assert "Resuming: 2 of 3 prompts are done" in capsys.readouterr().err


@shows("max_samples")
async def test_max_samples_is_the_first_valid_rows(server):
    run = await run_inline(server.base_url, ["a", b"broken", b"", {"prompt": ""}, "b", "c"], max_samples=2)
    assert (run.prompts, run.samples["not_selected"], server.count) == (["a", "b"], 1, 2)
    run = await run_inline(server.base_url, max_samples="all", resume=True)
    assert (run.prompts, run.samples["dataset_rows"], run.samples["invalid"]) == (["a", "b", "c"], 5, 2)


async def test_max_samples_all_is_typed_to_go_on_with_the_whole_dataset(server, tmp_path):
    dataset = write_dataset(tmp_path, ["a", "b", "c"])
    typed = {"dataset_file": dataset, "run_name": "r", "model": "m", "base_url": server.base_url, "sandbox": "local"}
    typed |= {"distribution": "terminal_only"}
    assert (await command(*as_flags(typed | {"max_samples": "2"}))).code == 0
    assert (await command(*as_flags(typed | {"max_samples": "all", "resume": "yes"}))).code == 0
    assert [request.prompt for request in server.requests] == ["a", "b", "c"]


@shows("seed")
async def test_seed_decides_the_draw_of_the_toolsets(server):
    drawn = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        prompts = [f"prompt {n}" for n in range(20)]
        run = await run_inline(server.base_url, prompts, run_name=name, distribution="development", seed=seed)
        drawn[name] = [row["toolsets_used"] for row in run.rows]
        assert {row["seed"] for row in run.rows} == {seed}
    assert drawn["first"] == drawn["again"] != drawn["other"]


@shows("keep_no_reasoning")
async def test_keep_no_reasoning_keeps_rows_without_reasoning(start_server):
    server = await start_server(no_reasoning)
    dropped = await run_inline(server.base_url, ["a"], run_name="dropped")
    assert (dropped.prompts, len(dropped.lines("discarded.jsonl")), dropped.shards) == ([], 1, {})
    assert (dropped.samples["discarded_no_reasoning"], dropped.samples["completed"]) == (1, 0)
    kept = await run_inline(server.base_url, run_name="kept", keep_no_reasoning=True)
    assert (kept.prompts, len(kept.lines("discarded.jsonl"))) == (["a"], 0)
    assert kept.row["outcome"] == "completed"


@shows("grace_s")
async def test_grace_s_is_how_long_a_prompt_in_flight_gets_after_a_first_ctrl_c(server):
    held = asyncio.Event()

    async def script(request: RecordedRequest) -> Answer:
        if request.prompt == "b":
            held.set()
            await asyncio.Event().wait()
        return one_turn(request)

    server.script = script
    options = run_options(server.base_url, ["a", "b", "c"], engine="inline", grace_s=1.5)
    async with started(*as_flags(options)) as running:
        await running.until(held)
        running.send(signal.SIGINT)
        await running.stderr_until("Stopping: 1 prompt in flight gets 1.5 s to finish; again: leave at once.")
        told_s = time.monotonic()
        ended = await running.ended()
    assert ended.code == 130
    assert time.monotonic() - told_s > 1.4
    assert server.prompts == ["a", "b"]
    assert orjson.loads(Path("data/run/statistics.json").read_bytes())["samples"]["completed"] == 1


@shows("retry", "accept_changes", "start_over")
async def test_retry_accept_changes_and_start_over_as_typed(server):
    """What they choose in detail is tested in `test_resuming_runs.py`."""
    options = run_options(server.base_url, ["a", "b"], batch_size=1)
    assert (await command(*as_flags(options))).code == 0
    ended = await command(*as_flags(options | {"model": "other/model", "retry": "ids:1"}), "--resume")
    assert (ended.code, server.count) == (2, 2)
    assert "--model='other/model' (it was 'test/model')" in ended.stderr
    ended = await command(
        *as_flags(options | {"model": "other/model", "retry": "ids:1"}), "--resume", "--accept_changes"
    )
    assert (ended.code, server.prompts[2:], server.requests[2].body["model"]) == (0, ["b"], "other/model")
    ended = await command(*as_flags(options))
    assert ended.code == 2
    assert "--start_over to move it aside" in ended.stderr
    assert (await command(*as_flags(options), "--start_over")).code == 0
    assert server.count == 5
    assert len(list(Path("data").iterdir())) == 2


@shows("engine")
@pytest.mark.parametrize("engine", ["inline", "processes", None])
async def test_engine_is_where_conversations_are_held(server, engine):
    server.script = by_turn(call("terminal", {"command": "cat /proc/$PPID/stat"}, reasoning="r"), say("done"))
    options = run_options(server.base_url, ["a"], sandbox="local") | ({"engine": engine} if engine else {})
    async with started(*as_flags(options)) as running:
        runner_pid = running.process.pid
        assert (await running.ended()).code == 0
    # The tool's parent is the sandbox's supervisor, whose parent is the process that holds the conversation.
    worker_pid = int(server.requests[1].tool_outputs[0].rpartition(")")[2].split()[1])
    assert (worker_pid == runner_pid) == (engine == "inline")


@shows("sandbox")
async def test_sandbox_is_where_tools_run(server, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("of the host")
    server.script = by_turn(call("terminal", {"command": f"cat {secret}"}, reasoning="r"), say("done"))
    seen = {}
    for name in ("local", "bubblewrap", "auto"):
        if name != "local" and not sandbox_class("bubblewrap").availability().works:
            pytest.skip("bubblewrap does not work here")
        run = await run_inline(server.base_url, ["a"], run_name=name, sandbox=name)
        seen[name] = "of the host" in server.requests[-1].tool_outputs[0]
        assert run.json("run.json")["sandbox"] == ("local" if name == "local" else "bubblewrap")
    assert seen == {"local": True, "bubblewrap": False, "auto": False}


async def test_an_unknown_sandbox_or_engine_is_refused(server):
    with pytest.raises(ConfigError, match="--sandbox=dcoker: unknown sandbox 'dcoker'; known: auto, bubblewrap, local"):
        await run_inline(server.base_url, ["a"], sandbox="dcoker")
    with pytest.raises(ConfigError, match="unknown engine 'ray'; known: processes, inline"):
        await run_inline(server.base_url, engine="ray")
    assert (server.count, Path("data").exists()) == (0, False)


@shows("verbose")
async def test_verbose_shows_each_turn(server, capsys):
    server.script = by_turn(call("terminal", {"command": "echo $((6*7))"}, reasoning="I compute."), say("It is 42."))
    await run_inline(server.base_url, ["a"], run_name="quiet", sandbox="local")
    assert "[0]" not in capsys.readouterr().err
    await run_inline(server.base_url, run_name="loud", sandbox="local", verbose=True)
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("[0]")] == [
        "[0] asks    a",
        "[0] thinks  I compute.",
        '[0] calls   terminal {"command": "echo $((6*7))"}',
        '[0] gets    {"output":"42","exit_code":0,"error":null}',
        "[0] says    It is 42.",
        "[0] ends    answer",
    ]


@shows("log_prefix_chars")
@pytest.mark.parametrize(("given", "shown"), [({}, "x" * 100 + "…"), ({"log_prefix_chars": 5}, "xxxxx…")])
async def test_log_prefix_chars_is_how_much_of_a_text_is_shown(server, capsys, given, shown):
    server.script = lambda request: say("x" * 101, reasoning="x" * 5)
    await run_inline(server.base_url, ["a"], verbose=True, **given)
    lines = capsys.readouterr().err.splitlines()
    assert f"[0] says    {shown}" in lines
    assert "[0] thinks  xxxxx" in lines


@shows("list_distributions")
async def test_list_distributions_prints_them_and_does_nothing_else(server):
    options = run_options(server.base_url, ["a"])
    ended = await command("--list_distributions", *as_flags(options))
    assert (ended.code, ended.stdout, ended.stderr) == (0, describe_distributions() + "\n", "")
    assert (server.count, Path("data").exists()) == (0, False)


@shows("config")
@pytest.mark.parametrize("name", ["options.toml", "options.yaml"])
async def test_config_gives_the_same_names_and_the_command_line_wins(server, name):
    options = run_options(server.base_url, ["a"], max_tokens=7, seed=8)
    content = "".join(
        f"{key} = {orjson.dumps(value).decode()}\n" if name.endswith("toml") else f"{key}: {value}\n"
        for key, value in options.items()
    )
    Path(name).write_text(content)
    ended = await command(f"--config={name}", "--seed=9", "--engine=inline")
    assert ended.code == 0, ended.stderr
    row = orjson.loads(Path("data/run/trajectories.jsonl").read_bytes())
    assert (server.bodies[0]["max_tokens"], row["seed"]) == (7, 9)


async def test_config_takes_the_run_json_of_a_former_run(server):
    first = await run_inline(server.base_url, ["a"], max_tokens=7, system_prompt="Be brief.", temperature=0.5)
    again = BatchRunner(config=str(first.path / "run.json"), run_name="again")
    await again.run()
    assert server.bodies[1] == server.bodies[0]
    assert Path("data/again/trajectories.jsonl").exists()


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────


@shows("model", "base_url")
async def test_model_and_base_url_are_what_is_called(proxy):
    row = (await run_inline("http://models.example.org:81/some/v2/", ["a"], model="1e5", api_key="k")).row
    (request,) = proxy.requests
    assert (request.host, request.path) == ("models.example.org", "/some/v2/chat/completions")
    assert (request.body["model"], row["metadata"]["model"]) == ("1e5", "1e5")


@shows("max_tokens", "temperature", "top_p")
async def test_sampling_flags_are_fields_of_each_request_and_absent_otherwise(server):
    given = {"max_tokens": 77, "temperature": 0.25, "top_p": 0.5}
    await run_inline(server.base_url, ["a"], run_name="given", **given)
    await run_inline(server.base_url, run_name="not_given")
    with_them, without = server.bodies
    assert {name: with_them[name] for name in given} == given
    assert set(with_them) - set(without) == set(given)
    assert set(without) == {"model", "messages", "tools"}


@shows("stream")
async def test_stream_asks_for_replies_in_pieces_and_the_rows_are_the_same(server):
    script = by_turn(call("terminal", {"command": "echo é"}, reasoning="I look."), say("It says é.", reasoning="Done."))
    rows = {}
    for name, given in (("whole", {}), ("pieces", {"stream": True})):
        server.script = script
        rows[name] = (await run_inline(server.base_url, ["a"], run_name=name, sandbox="local", **given)).row
    asked = [(body.get("stream"), body.get("stream_options")) for body in server.bodies]
    assert asked == [(None, None)] * 2 + [(True, {"include_usage": True})] * 2
    differing = {key for key in rows["whole"] if rows["whole"][key] != rows["pieces"][key]}
    assert differing == {"metadata", "duration_s"}


@shows("api_key")
async def test_api_key_is_sent_and_never_saved(proxy, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "from-the-environment")
    run = await run_inline(OPENROUTER, ["a"], api_key="sk-of-the-flag")
    assert [request.api_key for request in proxy.requests] == ["sk-of-the-flag"]
    for path in run.path.iterdir():
        content = path.read_bytes()
        assert b"sk-of-the-flag" not in content
        assert b"from-the-environment" not in content


async def test_a_server_on_this_machine_gets_no_key_of_the_environment(server, monkeypatch):
    for variable in ("OPENROUTER_API_KEY", "OPENAI_API_KEY", "API_KEY"):
        monkeypatch.setenv(variable, "secret")
    await run_inline(server.base_url, ["a"])
    (request,) = server.requests
    assert request.api_key == NO_KEY
    assert "secret" not in str(request.headers)


# ── the world behind TLS: keys of the environment, the default endpoint ───────────────────────────────────


class Internet:
    """A proxy behind which every host answers over TLS: with one scripted server."""

    def __init__(self, server: ScriptedServer, context: ssl.SSLContext) -> None:
        self.server = server
        self.hosts: list[str] = []
        """Each host to which a connection was asked for."""
        self._context = context
        self._tunnels: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "Internet":
        self._listener = await asyncio.start_server(self._tunnel, "127.0.0.1", 0)
        self.proxy_url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in self._tunnels:
            task.cancel()
        await asyncio.gather(*self._tunnels, return_exceptions=True)

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tunnels.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        self.hosts.append(head.split()[1].decode().partition(":")[0])
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await writer.start_tls(self._context)
        port = int(self.server.proxy_url.rpartition(":")[2])
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_pump(reader, server_writer), _pump(server_reader, writer))
        finally:
            for each in (writer, server_writer):
                each.close()
                with suppress(OSError, asyncio.CancelledError):
                    await each.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Path:
    """A certificate and its key, for every host the tests name."""
    path = tmp_path_factory.mktemp("tls") / "all.pem"
    hosts = ("openrouter.ai", "api.openai.com", "models.example.org")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=promptmill tests", "-addext", "subjectAltName=" + ",".join(f"DNS:{host}" for host in hosts),
         "-keyout", str(path), "-out", str(path.with_suffix(".crt"))],
        check=True, capture_output=True,
    )  # fmt: skip
    with path.open("a") as file:
        file.write(path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
async def internet(server, certificate, monkeypatch) -> AsyncIterator[Internet]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    for variable, key in {"OPENROUTER_API_KEY": "of-openrouter", "OPENAI_API_KEY": "of-openai"}.items():
        monkeypatch.setenv(variable, key)
    async with Internet(server, context) as internet:
        monkeypatch.setenv("HTTPS_PROXY", internet.proxy_url)
        monkeypatch.setenv("HTTP_PROXY", internet.proxy_url)
        yield internet


@pytest.mark.parametrize("given", [{}, {"model": "claude-sonnet-4.6"}, {"model": "anthropic/claude-sonnet-4.6"}])
async def test_the_defaults_are_claude_on_openrouter_with_its_key(internet, given):
    write_dataset(Path.cwd(), ["a"])
    ended = await command(*as_flags({"dataset_file": "prompts.jsonl", "run_name": "run", "engine": "inline"} | given))
    assert ended.code == 0, ended.stderr
    (request,) = internet.server.requests
    assert (request.host, request.path) == ("openrouter.ai", "/api/v1/chat/completions")
    assert (request.body["model"], request.api_key) == ("anthropic/claude-sonnet-4.6", "of-openrouter")
    assert request.body["reasoning"] == {"enabled": True, "effort": "medium"}
    assert internet.hosts == ["openrouter.ai"]


async def test_the_alias_is_a_models_own_name_elsewhere(server):
    await run_inline(server.base_url, ["a"], model="claude-sonnet-4.6")
    assert server.bodies[0]["model"] == "claude-sonnet-4.6"


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_a_key_of_the_environment_goes_to_its_own_host(internet, engine):
    await run_inline("https://api.openai.com/v1", ["a"], max_tokens=7, engine=engine)
    (request,) = internet.server.requests
    assert (internet.hosts, request.host, request.api_key) == (["api.openai.com"], "api.openai.com", "of-openai")
    assert (request.body["max_completion_tokens"], "max_tokens" in request.body) == (7, False)
    assert "reasoning" not in str(set(request.body))


async def test_another_host_gets_the_key_that_is_named_after_it(internet, monkeypatch):
    monkeypatch.setenv("HOST_MODELS_EXAMPLE_ORG_API_KEY", "of-example")
    await run_inline("https://models.example.org/v1", ["a"])
    assert [request.api_key for request in internet.server.requests] == ["of-example"]
    assert "of-open" not in str(internet.server.requests)


@pytest.mark.parametrize(
    ("base_url", "complaint"),
    [
        ("https://models.example.org/v1", "no key for models.example.org: set HOST_MODELS_EXAMPLE_ORG_API_KEY"),
        ("https://openrouter.ai.example.org/v1", "no key for openrouter.ai.example.org"),
        ("http://api.openai.com/v1", "OPENAI_API_KEY is not sent to api.openai.com unencrypted"),
    ],
)
async def test_a_foreign_host_is_refused_before_any_request_and_gets_no_key(internet, base_url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        await run_inline(base_url, ["a"])
    ended = await command(*as_flags(run_options(base_url, None)))
    assert (ended.code, ended.stdout) == (2, "")
    assert (internet.hosts, internet.server.count, Path("data").exists()) == ([], 0, False)


# ── limits (`test_budget.py` has their details) ───────────────────────────────────────────────────────────


def paid(request: RecordedRequest) -> Answer:
    """Answer at once; 110 tokens, a cent."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.01}
    return say(f"answer to {request.prompt}", reasoning="r", usage=usage)


@shows("max_cost_usd", "max_total_tokens", "max_duration_s")
@pytest.mark.parametrize(
    ("limit", "calls"),
    [({"max_cost_usd": 0.02}, 2), ({"max_total_tokens": 400}, 3), ({"max_duration_s": 0}, 0), ({"max_cost_usd": 0}, 1)],
)
async def test_a_limit_of_the_run_stops_the_starting_of_prompts(server, limit, calls):
    server.script = paid
    (name,) = limit
    with pytest.raises(LimitReachedError, match=f"--{name}=.* is reached: .*; {5 - calls} prompts left pending"):
        await run_inline(server.base_url, list("abcde"), num_workers=1, **limit)
    assert server.prompts == list("abcde")[:calls]
    assert orjson.loads(Path("data/run/statistics.json").read_bytes())["samples"]["pending"] == 5 - calls


@shows("max_failures")
@pytest.mark.parametrize(("limit", "calls"), [("0", 1), ("2", 3), ("40%", 20), ("none", 30)])
async def test_max_failures_stops_the_starting_of_prompts(server, limit, calls):
    server.script = lambda request: fail(400)
    options = run_options(server.base_url, [f"prompt {n}" for n in range(30)], num_workers=1, max_failures=limit)
    ended = await command(*as_flags(options))
    assert (ended.code, server.count) == (1, calls)
    assert (f"--max_failures={limit} is passed" in ended.stderr) == (limit != "none")


@shows("prompt_max_tokens")
@pytest.mark.parametrize(("given", "calls"), [({}, 10), ({"prompt_max_tokens": 330}, 3), ({"prompt_max_tokens": 1}, 1)])
async def test_prompt_max_tokens_ends_a_prompt_before_the_call_that_would_pass_it(server, given, calls):
    server.script = lambda request: call("terminal", {"command": "true"}, reasoning="again")
    row = (await run_inline(server.base_url, ["a"], sandbox="local", **given)).row
    assert (server.count, row["tool_stats"]["terminal"]["count"]) == (calls, calls)
    stop_reason = "prompt_max_tokens" if given else "max_turns"
    assert (row["completed"], row["partial"], row["stop_reason"]) == (False, True, stop_reason)


@shows("dry_run")
async def test_dry_run_runs_drawn_prompts_says_what_the_whole_takes_and_keeps_their_rows(server):
    prompts = [f"prompt {n}" for n in range(20)]
    server.script = paid
    options = run_options(server.base_url, prompts, batch_size=2)
    ended = await command(*as_flags(options), "--dry_run=5")
    assert (ended.code, server.count) == (0, 5), ended.stderr
    drawn = list(server.prompts)
    assert drawn != prompts[:5]
    assert "Dry run of 5 prompts, 15 left. For the whole run, with 95 % intervals:" in ended.stdout
    assert "cost    $0.2000 ($0.2000 to $0.2000)" in ended.stdout
    assert "tokens  2,200 (2,200 to 2,200)" in ended.stdout
    ended = await command(*as_flags(options), "--resume")
    assert (ended.code, server.count) == (0, 20), ended.stderr
    assert sorted(server.prompts) == sorted(prompts)
    await run_inline(server.base_url, None, run_name="again", dry_run=5)
    assert sorted(server.prompts[20:]) == sorted(drawn)


@shows("price_per_mtok")
async def test_price_per_mtok_is_what_calls_cost_whose_cost_the_endpoint_does_not_report(server, capsys):
    run = await run_inline(server.base_url, ["a", "b"], price_per_mtok="100,1000")
    assert [row["usage"]["cost_usd"] for row in run.rows] == [pytest.approx(0.02)] * 2
    assert run.json("statistics.json")["cost"]["usd"] == pytest.approx(0.04)
    assert "$0.0400" in capsys.readouterr().out
    server.script = paid
    run = await run_inline(server.base_url, ["a"], run_name="reported", price_per_mtok="100,1000")
    assert run.row["usage"]["cost_usd"] == 0.01


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_cost_usd", "-1"), ("max_cost_usd", "lots"), ("max_total_tokens", "1.5"), ("max_duration_s", "nan"),
     ("max_failures", "-1"), ("max_failures", "101%"), ("max_failures", "%"), ("prompt_max_tokens", "0"),
     ("price_per_mtok", "3"), ("price_per_mtok", "3,-1"), ("price_per_mtok", "3,1,1")],
)  # fmt: skip
async def test_a_limit_that_is_none_is_refused(server, name, value):
    with pytest.raises(ConfigError, match=f"--{name} is "):
        await run_inline(server.base_url, ["a"], **{name: value})
    assert server.count == 0


# ── provider routing and reasoning ────────────────────────────────────────────────────────────────────────


@shows("providers_allowed", "providers_ignored", "providers_order", "provider_sort")
@pytest.mark.parametrize(
    ("given", "provider"),
    [
        ({}, None),
        ({"providers_allowed": "anthropic,openai"}, {"only": ["anthropic", "openai"]}),
        ({"providers_ignored": "together, deepinfra"}, {"ignore": ["together", "deepinfra"]}),
        ({"providers_order": "b,a"}, {"order": ["b", "a"]}),
        ({"provider_sort": "price"}, {"sort": "price"}),
        ({"provider_sort": "throughput"}, {"sort": "throughput"}),
        ({"provider_sort": "latency"}, {"sort": "latency"}),
        (
            {"providers_allowed": "a,b", "providers_ignored": "c", "providers_order": "b", "provider_sort": "price"},
            {"only": ["a", "b"], "ignore": ["c"], "order": ["b"], "sort": "price"},
        ),
    ],
)
async def test_provider_flags_are_openrouters_provider_object(proxy, given, provider):
    await run_inline(OPENROUTER, ["a"], api_key="k", **given)
    (request,) = proxy.requests
    assert (request.host, request.body.get("provider")) == ("openrouter.ai", provider)


async def test_provider_flags_are_not_sent_elsewhere_and_the_start_says_so(server, capsys):
    await run_inline(server.base_url, ["a"], providers_allowed="a", provider_sort="price")
    assert "provider" not in server.bodies[0]
    assert "The provider flags are not sent: 127.0.0.1 is not OpenRouter" in capsys.readouterr().err


EFFORTS = [(effort, {"enabled": True, "effort": effort}) for effort in REASONING_EFFORTS if effort != "none"]


@shows("reasoning_effort", "reasoning_disabled")
@pytest.mark.parametrize(
    ("given", "reasoning"),
    [
        ({}, {"enabled": True, "effort": "medium"}),
        *(({"reasoning_effort": effort}, sent) for effort, sent in EFFORTS),
        ({"reasoning_effort": "none"}, {"enabled": False}),
        ({"reasoning_disabled": True}, {"enabled": False}),
        ({"reasoning_disabled": True, "reasoning_effort": "none"}, {"enabled": False}),
        ({"reasoning_disabled": False}, {"enabled": True, "effort": "medium"}),
    ],
)
async def test_reasoning_flags_are_openrouters_reasoning_object(proxy, given, reasoning):
    await run_inline(OPENROUTER, ["a"], api_key="k", **given)
    (request,) = proxy.requests
    assert (request.host, request.body["reasoning"]) == ("openrouter.ai", reasoning)
    assert "reasoning_effort" not in request.body


ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}
LEVEL_ON_OWN_SERVERS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high", "ultra": "high",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "level", "arguments"),
    [
        ({}, None, None),
        ({"reasoning_disabled": False}, None, None),
        *(({"reasoning_effort": effort}, level, ON) for effort, level in LEVEL_ON_OWN_SERVERS.items()),
        ({"reasoning_effort": "none"}, None, OFF),
        ({"reasoning_disabled": True}, None, OFF),
    ],
)
async def test_reasoning_flags_on_a_server_of_ones_own_are_what_its_chat_template_reads(
    server, capsys, given, level, arguments
):
    await run_inline(server.base_url, ["a"], **given)
    body = server.bodies[0]
    assert (body.get("reasoning_effort"), body.get("chat_template_kwargs")) == (level, arguments)
    assert "reasoning" not in body
    said = (
        f"--reasoning_effort={given.get('reasoning_effort')} is sent as {level!r}: 127.0.0.1" in capsys.readouterr().err
    )
    assert said == (level != given.get("reasoning_effort", level) and level is not None)


async def test_a_host_that_only_sounds_like_openrouter_is_another_host(proxy):
    await run_inline("http://notopenrouter.ai/v1", ["a"], api_key="k", reasoning_effort="low", providers_allowed="a")
    (request,) = proxy.requests
    assert {"reasoning_effort", "reasoning", "provider"} & set(request.body) == {"reasoning_effort"}


@pytest.mark.parametrize("given", [{"reasoning_disabled": True}, {"reasoning_effort": "none"}])
async def test_switching_reasoning_off_warns_that_rows_will_be_discarded(server, capsys, given):
    await run_inline(server.base_url, ["a"], run_name="warned", **given)
    assert "rows without any reasoning are discarded: give --keep_no_reasoning" in capsys.readouterr().err
    await run_inline(server.base_url, run_name="kept", keep_no_reasoning=True, **given)
    assert "discarded" not in capsys.readouterr().err.replace("discarded 0", "")


async def test_contradicting_flags_are_refused(server):
    with pytest.raises(ConfigError, match="--reasoning_disabled contradicts --reasoning_effort=high"):
        await run_inline(server.base_url, ["a"], reasoning_disabled=True, reasoning_effort="high")
    with pytest.raises(ConfigError, match="provider 'a' is both asked for and in --providers_ignored"):
        await run_inline(server.base_url, providers_ignored="a", providers_order="b,a")
    assert server.count == 0


# ── what stands before the prompt ─────────────────────────────────────────────────────────────────────────


@shows("system_prompt")
@pytest.mark.parametrize(
    ("given", "system"),
    [({}, DEFAULT_SYSTEM_PROMPT), ({"system_prompt": "null"}, "null"), ({"system_prompt": ""}, None)],
)
async def test_system_prompt_is_sent_and_is_the_rows_system_turn(server, given, system):
    row = (await run_inline(server.base_url, ["a"], **given)).row
    turns = [(turn["from"], turn["value"]) for turn in row["conversations"]]
    opening = [] if system is None else [("system", system)]
    assert turns[:-1] == [*opening, ("human", "a")]
    assert server.bodies[0]["messages"] == [
        *({"role": "system", "content": content} for _, content in opening),
        {"role": "user", "content": "a"},
    ]


@shows("ephemeral_system_prompt")
@pytest.mark.parametrize(
    ("system", "sent"), [("Saved.", "Saved.\n\nNever saved."), ("", "Never saved.")], ids=["beside", "alone"]
)
async def test_ephemeral_system_prompt_is_sent_on_every_request_and_never_saved(server, system, sent):
    server.script = by_turn(call("terminal", {"command": "true"}, reasoning="r"), say("done"))
    options = {"system_prompt": system, "ephemeral_system_prompt": "Never saved.", "sandbox": "local"}
    run = await run_inline(server.base_url, ["a"], **options)
    assert [request.system for request in server.requests] == [[sent], [sent]]
    assert [turn["value"] for turn in run.row["conversations"] if turn["from"] == "system"] == [system] * bool(system)
    assert "Never saved." not in (run.path / "batch_0.jsonl").read_text()


@shows("prefill_messages_file")
async def test_prefill_messages_file_stands_before_the_prompt_on_every_request_and_is_never_saved(server):
    server.script = by_turn(call("terminal", {"command": "true"}, reasoning="r"), say("done", reasoning="r"))
    prefill = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four!"}]
    Path("prefill.json").write_bytes(orjson.dumps(prefill))
    run = await run_inline(server.base_url, ["a"], prefill_messages_file="prefill.json", sandbox="local")
    system = {"role": "system", "content": DEFAULT_SYSTEM_PROMPT}
    first, second = (body["messages"] for body in server.bodies)
    assert first == [system, *prefill, {"role": "user", "content": "a"}]
    assert second[:4] == first
    assert [message["role"] for message in second[4:]] == ["assistant", "tool"]
    assert [turn["from"] for turn in run.row["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert "four!" not in (run.path / "batch_0.jsonl").read_text()


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON", '[{"role": "robot", "content": "x"}]'])
async def test_an_unusable_prefill_file_is_refused_before_any_request(server, content):
    Path("prefill.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--prefill_messages_file=prefill\.json: "):
        await run_inline(server.base_url, ["a"], prefill_messages_file="prefill.json")
    assert (server.count, Path("data").exists()) == (0, False)
