"""`BatchRunner` as scripts use it: the documented script, every promise about its run, and big and interrupted runs."""

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import orjson
import pytest

from promptmill.errors import ConfigError, EndpointError
from promptmill.run_folder import RunFolder
from promptmill.runner import BatchRunner
from tests.fakes.model_server import (
    REPOSITORY,
    Answer,
    RecordedRequest,
    ScriptedServer,
    ServerProcess,
    call,
    fail,
    final_answer,
    no_reasoning,
    one_turn,
    say,
    three_turns,
    token_of,
)
from tests.rows import make_result, read_jsonl, write_dataset
from tests.test_command import Ended, RunFiles, as_flags, command, run_inline, run_options, started

ENGINES = ("inline", "processes")


@pytest.fixture
async def server(start_server) -> ScriptedServer:
    """Answers each prompt at once, with reasoning."""
    return await start_server(one_turn)


def run_folder(name: str = "run") -> RunFiles:
    return RunFiles(Path("data") / name)


# ── as documented ─────────────────────────────────────────────────────────────────────────────────────────

DOCUMENTED_SCRIPT = """
import asyncio
import os

from batch_runner import BatchRunner


async def main() -> None:
    runner = BatchRunner(
        dataset_file="prompts.jsonl",
        batch_size=8,
        run_name="tool-training",
        distribution="terminal_only",
        base_url=os.getenv("MODEL_BASE_URL") or None,
        api_key=os.getenv("MODEL_API_KEY") or None,
        model=os.environ["MODEL_ID"],
        num_workers=4,
        max_iterations=20,
        reasoning_config={"enabled": True, "effort": "low"},
    )
    await runner.run(resume=True)


asyncio.run(main())
"""
"""Word for word the script of the documents; it has no main guard."""


async def test_the_documented_script_runs_as_it_is_written(start_server, tmp_path):
    server = await start_server(three_turns)
    prompts = [f"prompt {n}" for n in range(9)]
    write_dataset(tmp_path, [*prompts[:3], b"{malformed", {"no": "prompt"}, *prompts[3:]])
    script = tmp_path / "script.py"
    script.write_text(DOCUMENTED_SCRIPT)
    environ = {
        "PYTHONPATH": str(REPOSITORY),
        "MODEL_BASE_URL": server.base_url,
        "MODEL_API_KEY": "sk-model",
        "MODEL_ID": "vendor/model",
    }
    for _ in range(2):
        ended = await command(script=str(script), **environ)
        assert ended.code == 0, ended.stderr
    run = run_folder("tool-training")
    assert run.shards == {"batch_0.jsonl": prompts[:8], "batch_1.jsonl": prompts[8:]}
    assert run.prompts == prompts
    assert run.json("checkpoint.json")["completed_prompts"] == list(range(9))
    assert run.samples["invalid"] == 2
    assert run.json("run.json")["options"]["max_turns"] == 20
    assert {tuple(row["toolsets_used"]) for row in run.rows} == {("terminal", "file")}
    assert server.count == 27
    assert {(request.api_key, request.body["model"]) for request in server.requests} == {("sk-model", "vendor/model")}
    assert {request.body["reasoning_effort"] for request in server.requests} == {"low"}


async def test_without_a_base_url_and_a_key_they_come_from_the_defaults_and_the_environment(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"no key for openrouter\.ai: set OPENROUTER_API_KEY"):
        await run_inline(None, ["a"], api_key=None)
    assert not Path("data").exists()


async def test_run_returns_none_and_statistics_tell_what_happened(server, tmp_path):
    runner = BatchRunner(write_dataset(tmp_path, ["a", "b"]), 1, "run", model="m", base_url=server.base_url)
    assert await runner.run() is None
    assert runner.statistics == run_folder().json("statistics.json")
    assert run_folder().shards == {"batch_0.jsonl": ["a"], "batch_1.jsonl": ["b"]}


async def test_max_iterations_is_max_turns(server):
    server.script = lambda request: call("terminal", {"command": "true"}, reasoning="again")
    row = (await run_inline(server.base_url, ["a"], max_iterations=3, sandbox="local")).row
    assert (server.count, row["api_calls"], row["stop_reason"]) == (3, 3, "max_turns")


@pytest.mark.parametrize(
    ("reasoning_config", "sent"),
    [
        (None, {"enabled": True, "effort": "medium"}),
        ({}, {"enabled": True, "effort": "medium"}),
        ({"enabled": True, "effort": "low"}, {"enabled": True, "effort": "low"}),
        ({"enabled": True}, {"enabled": True, "effort": "medium"}),
        ({"effort": "high"}, {"enabled": True, "effort": "high"}),
        ({"enabled": False}, {"enabled": False}),
        ({"enabled": False, "effort": "high"}, {"enabled": False}),
        ({"effort": "none"}, {"enabled": False}),
        ({"enabled": 0}, {"enabled": False}),
        ({"enabled": None, "effort": None}, {"enabled": True, "effort": "medium"}),
    ],
)
async def test_reasoning_config_is_what_is_asked_for(server, monkeypatch, reasoning_config, sent):
    monkeypatch.setenv("HTTP_PROXY", server.proxy_url)
    await run_inline("http://openrouter.ai/api/v1", ["a"], api_key="k", reasoning_config=reasoning_config)
    assert server.bodies[0]["reasoning"] == sent


@pytest.mark.parametrize("reasoning_config", [{"effort": "extreme"}, {"enabled": True, "max_tokens": 5}])
async def test_an_unknown_reasoning_config_is_refused(server, reasoning_config):
    with pytest.raises(ConfigError, match="extreme|max_tokens"):
        await run_inline(server.base_url, ["a"], reasoning_config=reasoning_config)
    assert server.count == 0


async def test_prefill_messages_are_sent_and_never_saved(server):
    prefill = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four!"}]
    run = await run_inline(server.base_url, ["a"], prefill_messages=prefill, system_prompt="")
    assert server.bodies[0]["messages"] == [*prefill, {"role": "user", "content": "a"}]
    assert [turn["from"] for turn in run.row["conversations"]] == ["human", "gpt"]
    with pytest.raises(ConfigError, match="prefill_messages: message 1 must be"):
        BatchRunner(**run_options(server.base_url, None), prefill_messages=[{"role": "user"}])


def test_an_unknown_option_is_refused_by_the_constructor():
    with pytest.raises(ConfigError, match="unknown option 'batchsize'"):
        BatchRunner("prompts.jsonl", run_name="run", batchsize=3)


async def test_resume_on_a_fresh_name_starts_it_and_says_so(server, capsys):
    run = await run_inline(server.base_url, ["a"], resume=True)
    assert run.prompts == ["a"]
    assert "There is no run in data/run to go on with: it starts now" in capsys.readouterr().err


async def test_a_run_that_exists_is_refused_without_resume(server):
    run = await run_inline(server.base_url, ["a"])
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(ConfigError, match="data/run already holds a run: add --resume"):
        await run_inline(server.base_url)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    assert server.count == 1


async def test_a_run_that_is_in_use_is_refused(server):
    reached = asyncio.Event()
    release = asyncio.Event()

    async def hold(request: RecordedRequest) -> Answer:
        reached.set()
        await release.wait()
        return one_turn(request)

    server.script = hold
    first = asyncio.create_task(run_inline(server.base_url, ["a"]))
    await reached.wait()
    with pytest.raises(ConfigError, match=f"data/run is in use by process {os.getpid()} on "):
        await run_inline(server.base_url, resume=True)
    release.set()
    assert (await first).prompts == ["a"]
    assert server.count == 1


# ── outcomes and resume ───────────────────────────────────────────────────────────────────────────────────


async def test_a_failed_prompt_is_run_again_on_resume(server):
    server.script = lambda request: fail(400, "not that one") if request.prompt == "bad" else one_turn(request)
    run = await run_inline(server.base_url, ["a", "bad", "c"])
    assert (run.prompts, run.samples["failed"]) == (["a", "c"], 1)
    (failed,) = run.lines("failed.jsonl")
    assert (failed["outcome"], failed["stop_reason"], failed["attempt"]) == ("failed_permanent", "rejected_request", 1)
    assert "answered 400: not that one" in failed["error"]
    assert run.json("checkpoint.json")["completed_prompts"] == [0, 2]
    server.script = one_turn
    run = await run_inline(server.base_url, resume=True)
    assert (server.prompts, run.prompts) == (["a", "bad", "c", "bad"], ["a", "c", "bad"])
    assert [row["attempt"] for row in run.rows] == [1, 1, 2]
    assert (run.samples["failed"], run.samples["completed"], run.samples["pending"]) == (0, 3, 0)
    assert run.json("checkpoint.json")["completed_prompts"] == [0, 1, 2]


async def test_a_provider_that_fails_past_all_retries_fails_the_prompt_as_transient(server):
    now = {"Retry-After": "0"}
    server.script = lambda request: fail(500, "busy", headers=now) if request.prompt == "b" else one_turn(request)
    run = await run_inline(server.base_url, ["a", "b", "c"])
    assert server.prompts == ["a", "b", "b", "b", "b", "c"]
    (failed,) = run.lines("failed.jsonl")
    assert (failed["outcome"], failed["stop_reason"]) == ("failed_transient", "provider_failed")
    assert run.prompts == ["a", "c"]


async def test_a_row_that_names_an_image_fails_as_permanent_and_the_others_run(server):
    run = await run_inline(server.base_url, ["a", {"prompt": "b", "image": "python:3.11-slim"}, "c"])
    assert (run.prompts, server.prompts) == (["a", "c"], ["a", "c"])
    (failed,) = run.lines("failed.jsonl")
    assert (failed["outcome"], failed["image"], failed["api_calls"]) == ("failed_permanent", "python:3.11-slim", 0)
    assert "python:3.11-slim" in failed["error"]
    run = await run_inline(server.base_url, resume=True)
    assert [row["attempt"] for row in run.lines("failed.jsonl")] == [1, 2]
    assert (run.samples["failed"], run.samples["completed"], server.count) == (1, 2, 2)


async def test_a_refused_key_stops_the_run_and_resume_goes_on(server):
    server.script = lambda request: fail(401, "bad key") if request.prompt == "b" else one_turn(request)
    with pytest.raises(EndpointError, match="answered 401: bad key; check the key"):
        await run_inline(server.base_url, ["a", "b", "c"], batch_size=1, num_workers=1)
    run = run_folder()
    assert (run.prompts, run.lines("failed.jsonl"), server.prompts) == (["a"], [], ["a", "b"])
    assert (run.samples["completed"], run.samples["failed"], run.samples["pending"]) == (1, 0, 2)
    server.script = one_turn
    assert (await run_inline(server.base_url, resume=True)).prompts == ["a", "b", "c"]
    assert server.prompts == ["a", "b", "b", "c"]


DISCARDED = "The first 20 prompts were all discarded"


async def test_20_discards_and_nothing_else_warn_that_the_model_returns_no_reasoning(server, capsys):
    prompts = [f"prompt {n}" for n in range(22)]
    server.script = no_reasoning
    await run_inline(server.base_url, prompts[:19], run_name="19")
    assert DISCARDED not in capsys.readouterr().err
    run = await run_inline(server.base_url, prompts, run_name="all")
    shown = capsys.readouterr().err
    assert shown.count(DISCARDED) == 1
    assert "--keep_no_reasoning" in shown
    assert (len(run.lines("discarded.jsonl")), run.prompts, run.samples["discarded_no_reasoning"]) == (22, [], 22)
    server.script = lambda request: say("x", reasoning="r" if request.prompt == "prompt 0" else None)
    await run_inline(server.base_url, run_name="one_has_some")
    assert DISCARDED not in capsys.readouterr().err


async def test_discarded_rows_are_done_and_keep_no_reasoning_on_resume_brings_them_back_without_a_call(server):
    server.script = lambda request: say(f"answer to {request.prompt}", reasoning="r" if request.prompt == "b" else None)
    await run_inline(server.base_url, ["a", "b", "c"])
    run = await run_inline(server.base_url, resume=True)
    assert (run.prompts, server.count) == (["b"], 3)
    run = await run_inline(server.base_url, resume=True, keep_no_reasoning=True)
    assert (sorted(run.prompts), server.count) == (["a", "b", "c"], 3)
    assert (run.samples["completed"], run.samples["discarded_no_reasoning"]) == (3, 0)
    assert all(
        row["conversations"][-1]["value"].endswith(f"answer to {p}")
        for p, row in zip(run.prompts, run.rows, strict=True)
    )


async def test_a_hallucinated_tool_is_left_out_of_the_merge_and_kept_in_its_shard(server):
    def script(request: RecordedRequest) -> Answer:
        if request.prompt == "b" and request.turn == 0:
            return call("fly_to_the_moon", {"speed": "fast"}, reasoning="r")
        return one_turn(request)

    server.script = script
    run = await run_inline(server.base_url, ["a", "b", "c"])
    assert (run.prompts, run.shards) == (["a", "c"], {"batch_0.jsonl": ["a", "b", "c"]})
    kept = run.lines("batch_0.jsonl")[1]
    assert (kept["unknown_tools"], kept["outcome"]) == (["fly_to_the_moon"], "completed")
    assert "fly_to_the_moon" not in kept["tool_stats"]
    assert "does not exist. Available tools: terminal" in kept["conversations"][3]["value"]
    assert run.json("statistics.json")["filtered_by_reason"] == {"hallucinated_tool": 1}
    assert (run.samples["filtered"], run.samples["completed"]) == (1, 2)
    await run_inline(server.base_url, resume=True)
    assert Counter(server.prompts) == {"a": 1, "b": 2, "c": 1}


async def test_a_tool_of_the_run_that_was_not_drawn_for_the_prompt_is_an_error_and_no_hallucination(server):
    names = {"terminal": "write_file", "write_file": "terminal"}

    def script(request: RecordedRequest) -> Answer:
        not_offered = names.get(request.tool_names[0]) if len(request.tool_names) < 6 else None
        if request.turn == 0 and not_offered:
            return call(not_offered, {}, reasoning="r")
        return one_turn(request)

    server.script = script
    run = await run_inline(server.base_url, [f"prompt {n}" for n in range(12)], distribution="development")
    called = [row for row in run.rows if len(row["conversations"]) > 3]
    assert called
    assert len(run.rows) == 12
    assert all(row["unknown_tools"] == [] for row in called)


async def test_max_samples_on_resume_is_the_runs_own_unless_another_is_given(server):
    await run_inline(server.base_url, list("abcde"), max_samples=2)
    run = await run_inline(server.base_url, resume=True)
    assert (run.prompts, run.samples["not_selected"]) == (["a", "b"], 3)
    run = await run_inline(server.base_url, resume=True, max_samples=4)
    assert (run.prompts, run.samples["pending"]) == (["a", "b", "c", "d"], 0)
    run = await run_inline(server.base_url, resume=True, max_samples=1)
    assert (run.prompts, run.samples["not_selected"]) == (["a"], 4)
    assert run.json("statistics.json")["rows_left_behind"]["not_in_dataset"] == 3
    run = await run_inline(server.base_url, resume=True, max_samples="all")
    assert (sorted(run.prompts), server.count) == (list("abcde"), 5)


async def test_a_prompt_listed_three_times_is_owed_three_rows(server):
    await run_inline(server.base_url, ["a", "a", "b", "a"], max_samples=2)
    run = await run_inline(server.base_url, resume=True, max_samples="all")
    assert Counter(server.prompts) == Counter(run.prompts) == {"a": 3, "b": 1}
    assert sorted(row["occurrence"] for row in run.rows) == [0, 0, 1, 2]
    run = await run_inline(server.base_url, ["a", "b", "a", "a", "a"], resume=True)
    assert Counter(server.prompts) == Counter(run.prompts) == {"a": 4, "b": 1}


async def test_resume_goes_by_content_when_the_dataset_was_reordered_and_grown(server):
    await run_inline(server.base_url, ["a", "b"])
    run = await run_inline(server.base_url, ["new", "b", "a"], resume=True)
    assert server.prompts == ["a", "b", "new"]
    assert run.json("checkpoint.json")["completed_prompts"] == [0, 1, 2]


async def test_further_columns_are_carried_to_the_row(server, tmp_path):
    sample = {"prompt": "a", "id": 7, "meta": {"x": [1, None]}, "cwd": str(tmp_path)}
    row = (await run_inline(server.base_url, [sample], sandbox="local")).row
    assert (orjson.loads(row["extra"]), row["cwd"]) == ({"id": 7, "meta": {"x": [1, None]}}, str(tmp_path))


async def test_the_draw_of_the_toolsets_depends_on_nothing_but_seed_content_and_occurrence(server):
    prompts = [f"prompt {n % 12}" for n in range(16)]
    ways = {
        "one by one": [{"num_workers": 1, "batch_size": 16}],
        "many at once": [{"num_workers": 8, "batch_size": 2}],
        "processes": [{"num_workers": 4, "batch_size": 3, "engine": "processes"}],
        "in two starts": [{"max_samples": 5}, {"max_samples": 16, "resume": True}],
        "backwards": [{}],
    }
    drawn = {}
    for name, starts in ways.items():
        for start in starts:
            rows = prompts[::-1] if name == "backwards" else prompts
            run = await run_inline(server.base_url, rows, run_name=name, distribution="development", seed=3, **start)
        key = [(row["content_hash"], row["occurrence"]) for row in run.rows]
        assert len(set(key)) == 16
        drawn[name] = dict(zip(key, (row["toolsets_used"] for row in run.rows), strict=True))
    assert all(other == drawn["one by one"] for other in drawn.values())
    assert len(set(map(tuple, drawn["one by one"].values()))) > 1


# ── cancellation ──────────────────────────────────────────────────────────────────────────────────────────


async def test_cancelling_does_not_stop_an_append_that_has_begun(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open()
    appending = asyncio.create_task(folder.append(make_result("a")))
    await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    assert len(read_jsonl(folder.shard(0))) == 1
    folder.close()


async def test_rows_that_are_appended_just_as_others_are_done_are_written_too(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open()

    async def append_all(number: int) -> None:
        steps = random.Random(number)
        for index in range(50):
            for _ in range(steps.randrange(200)):  # the loop goes on: appends meet the writer at every moment
                await asyncio.sleep(0)
            await folder.append(make_result(f"{number}-{index}", batch_number=number))

    async with asyncio.timeout(60):
        await asyncio.gather(*map(append_all, range(12)))
    assert [len(read_jsonl(path)) for path in folder.shards()] == [50] * 12
    folder.close()


@pytest.mark.parametrize("engine", ENGINES)
async def test_cancelling_keeps_what_is_finished_and_resume_completes_it_exactly(server, engine):
    held: set[str] = set()
    both_held = asyncio.Event()

    async def hold_second_of_each_batch(request: RecordedRequest) -> Answer:
        if request.prompt in ("b", "e"):
            held.add(request.prompt)
            if len(held) == 2:
                both_held.set()
            await asyncio.Event().wait()
        return one_turn(request)

    server.script = hold_second_of_each_batch
    options = {"batch_size": 3, "num_workers": 2, "engine": engine}
    running = asyncio.create_task(run_inline(server.base_url, list("abcdef"), **options))
    await both_held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    run = run_folder()
    assert (sorted(run.prompts), run.shards) == (["a", "d"], {"batch_0.jsonl": ["a"], "batch_1.jsonl": ["d"]})
    assert run.json("checkpoint.json")["completed_prompts"] == [0, 3]
    assert (run.samples["completed"], run.samples["failed"], run.samples["pending"]) == (2, 0, 4)
    assert run.lines("failed.jsonl") == []
    server.script = one_turn
    run = await run_inline(server.base_url, resume=True, **options)
    assert Counter(run.prompts) == Counter("abcdef")
    assert Counter(server.prompts) == Counter("abcdefbe")


async def test_cancelling_kills_what_the_tools_run(server, tmp_path):
    started_file = tmp_path / "pid"
    os.mkfifo(started_file)
    command_line = f"echo $$ > {started_file}; exec sleep 600"
    server.script = lambda request: call("terminal", {"command": command_line}, reasoning="r")
    running = asyncio.create_task(run_inline(server.base_url, ["a"], sandbox="local"))
    pid = int(await asyncio.to_thread(started_file.read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Path(f"/proc/{pid}").exists()


# ── a thousand prompts ────────────────────────────────────────────────────────────────────────────────────


def is_whole(row: dict) -> bool:
    """Whether a row is `three_turns` to the end, its own tools' output in it."""
    prompt = row["conversations"][1]["value"]
    roles = [turn["from"] for turn in row["conversations"]]
    return (
        roles == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]
        and orjson.loads(row["conversations"][3]["value"])["output"] == token_of(prompt)
        and row["conversations"][-1]["value"].endswith(final_answer(prompt))
        and row["api_calls"] == 3
    )


def assert_complete(run: RunFiles, prompts: list[str]) -> None:
    """All prompts have their row, none twice, none torn; shards, merge, checkpoint and statistics agree."""
    sharded = [row for path in run.path.glob("batch_*.jsonl") for row in read_jsonl(path)]
    for rows in (sharded, run.rows):
        assert Counter(row["conversations"][1]["value"] for row in rows) == Counter(prompts)
        assert all(map(is_whole, rows))
    assert run.json("checkpoint.json")["completed_prompts"] == list(range(len(prompts)))
    samples = run.samples
    assert (samples["completed"], samples["pending"], samples["failed"]) == (len(prompts), 0, 0)
    assert run.json("statistics.json")["rows_left_behind"]["unreadable_lines"] == 0
    usage = run.json("statistics.json")["tool_usage"]
    assert usage["terminal"] == {"count": len(prompts), "success": len(prompts), "failure": 0, "success_percent": 100.0}


@pytest.mark.slow
async def test_1000_prompts_of_3_turns_with_64_workers(tmp_path):
    prompts = [f"prompt {n}" for n in range(1000)]
    write_dataset(tmp_path, prompts)
    with ServerProcess("three_turns") as server:
        ended = await command(*as_flags(run_options(server.base_url, None, num_workers=64)), timeout_s=300)
        assert ended.code == 0, ended.stderr
        assert server.counters()["statuses"] == {"200": 3000}
    run = run_folder()
    assert_complete(run, prompts)
    assert run.shards["batch_7.jsonl"] == prompts[70:80]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "size", "code"), [(signal.SIGINT, 1000, 130), (signal.SIGKILL, 300, -9)], ids=["SIGINT", "SIGKILL"]
)
async def test_an_interrupted_run_of_64_workers_resumes_to_exactly_the_same_set(
    start_server, tmp_path, number, size, code
):
    half_way = asyncio.Event()

    def script(request: RecordedRequest) -> Answer:
        if request.number == size * 3 // 2:
            half_way.set()
        return three_turns(request)

    server = await start_server(script)
    prompts = [f"prompt {n}" for n in range(size)]
    write_dataset(tmp_path, prompts)
    async with started(
        *as_flags(run_options(server.base_url, None, num_workers=64, batch_size=5)), timeout_s=300
    ) as running:
        await running.until(half_way)
        running.send(number)
        ended = await running.ended()
    assert ended.code == code
    run = run_folder()
    kept = whole_rows_in_shards(run)
    assert 0 < len(kept) < size
    if number == signal.SIGINT:
        assert Counter(run.prompts) == Counter(kept)
        assert run.samples["completed"] == len(kept)
        assert len(run.json("checkpoint.json")["completed_prompts"]) == len(kept)
        assert run.samples["pending"] == size - len(kept)
    resumed: Ended = await command("--run_name=run", "--resume", timeout_s=300)
    assert resumed.code == 0, resumed.stderr
    assert f"Resuming: {len(kept)} of {size:,} prompts are done" in resumed.stderr
    assert_complete(run, prompts)


def whole_rows_in_shards(run: RunFiles) -> list[str]:
    """The prompts on disk; a kill may have torn a shard's last line, and no other."""
    prompts = []
    for path in run.path.glob("batch_*.jsonl"):
        lines = path.read_bytes().split(b"\n")
        rows = [orjson.loads(line) for line in lines[:-1]]
        assert all(map(is_whole, rows))
        prompts += [row["conversations"][1]["value"] for row in rows]
    assert len(set(prompts)) == len(prompts)
    return prompts
