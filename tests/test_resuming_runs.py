"""Runs that are resumed: with whose settings, which prompts again, and what became of the rows of before."""

import asyncio
import os
from pathlib import Path

import orjson
import pytest

from promptmill.errors import ConfigError, LimitReachedError
from promptmill.retry import read_retry
from promptmill.run_folder import RunFolder
from tests.fakes.model_server import fail, no_reasoning, one_turn, say
from tests.rows import make_row, read_jsonl, write_dataset, write_jsonl
from tests.test_command import as_flags, command, run_inline, run_options

# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def server(start_server):
    return await start_server(one_turn)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"model": "other/model"}, "--model='other/model' (it was 'test/model')"),
        ({}, {"system_prompt": "Be brief."}, "--system_prompt='Be brief.' (it was the default)"),
        ({"temperature": 0.5}, {"temperature": 0.7}, "--temperature=0.7 (it was 0.5)"),
        ({}, {"distribution": "terminal_only"}, "--distribution='terminal_only' (it was 'default')"),
        ({}, {"reasoning_effort": "high"}, "--reasoning_effort='high' (it was empty)"),
        ({}, {"ephemeral_system_prompt": "x"}, "--ephemeral_system_prompt='x' (it was empty)"),
        ({}, {"prefill_messages": [{"role": "user", "content": "x"}]}, "other prefill messages"),
    ],
)
async def test_a_setting_that_shapes_rows_must_be_accepted_to_change(server, capsys, before, now, named):
    await run_inline(server.base_url, ["a", "b"], max_samples=1, **before)
    with pytest.raises(ConfigError) as refused:
        await run_inline(server.base_url, resume=True, max_samples=2, **before | now)
    assert named in str(refused.value)
    assert server.count == 1
    run = await run_inline(server.base_url, resume=True, max_samples=2, accept_changes=True, **before | now)
    assert (run.prompts, server.count) == (["a", "b"], 2)
    assert f"Changed since the run was started, and accepted: {named}" in capsys.readouterr().err


async def test_workers_timeouts_limits_and_addresses_change_freely(server, start_server):
    await run_inline(server.base_url, ["a", "b"], max_samples=1)
    elsewhere = await start_server(one_turn)
    free = {
        "num_workers": 2,
        "batch_size": 1,
        "request_timeout_s": 9,
        "max_turns": 3,
        "max_total_tokens": 10**6,
        "stream": True,
    }
    run = await run_inline(elsewhere.base_url, resume=True, max_samples="all", **free)
    assert (run.prompts, elsewhere.count) == (["a", "b"], 1)


async def test_each_row_records_the_settings_that_made_it(server):
    await run_inline(server.base_url, ["a", "b"], max_samples=1, temperature=0.5, max_turns=3)
    changed = {"temperature": 0.75, "model": "other/model"}
    run = await run_inline(server.base_url, resume=True, max_samples=2, accept_changes=True, **changed)
    first, second = run.rows
    assert (first["metadata"]["model"], second["metadata"]["model"]) == ("test/model", "other/model")
    assert orjson.loads(first["settings"]) == {"distribution": "default", "max_turns": 3, "temperature": 0.5}
    assert orjson.loads(second["settings"]) == {"distribution": "default", "max_turns": 3, "temperature": 0.75}


async def test_the_same_settings_typed_again_are_no_change(server):
    typed = {"temperature": 0.5, "model": "m", "system_prompt": "s", "reasoning_effort": "low"}
    await run_inline(server.base_url, ["a", "b"], max_samples=1, **typed)
    run = await run_inline(server.base_url, resume=True, max_samples=2, **typed)
    assert run.prompts == ["a", "b"]


async def test_the_run_name_and_resume_alone_go_on_as_before(server):
    options = run_options(server.base_url, ["a", "b"], temperature=0.5, max_samples=1)
    assert (await command(*as_flags(options))).code == 0
    write_dataset(Path.cwd(), ["a", "b"])
    ended = await command("--run_name=run", "--resume", "--max_samples=all")
    assert ended.code == 0, ended.stderr
    assert [request.body["temperature"] for request in server.requests] == [0.5, 0.5]
    assert [request.body["model"] for request in server.requests] == ["test/model"] * 2


# ── datasets ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_dataset_is_refused_before_anything_is_sent(server):
    await run_inline(server.base_url, ["a", "b"])
    with pytest.raises(ConfigError, match="holds 2 rows, and none is of a prompt of prompts.jsonl"):
        await run_inline(server.base_url, ["c", "d"], resume=True)
    assert server.count == 2
    run = await run_inline(server.base_url, ["c", "d"], resume=True, accept_changes=True)
    assert (run.prompts, server.count) == (["c", "d"], 4)


async def test_the_merge_and_the_totals_are_those_of_the_dataset_as_it_is_now(server, capsys):
    server.script = lambda request: fail(400) if request.prompt == "bad" else one_turn(request)
    await run_inline(server.base_url, ["a", "bad", "b"])
    run = await run_inline(server.base_url, ["b", "c", b"{"], resume=True)
    assert sorted(run.prompts) == ["b", "c"]
    assert run.samples == {
        "dataset_rows": 3, "completed": 2, "partial": 0, "discarded_no_reasoning": 0, "filtered": 0, "failed": 0,
        "pending": 0, "not_selected": 0, "invalid": 1,
    }  # fmt: skip
    assert run.json("statistics.json")["rows_left_behind"]["not_in_dataset"] == 1
    assert "Of prompts that are not in the dataset now, kept but not merged: 1 row" in capsys.readouterr().out
    run = await run_inline(server.base_url, ["a", "b", "c"], resume=True)
    assert (sorted(run.prompts), server.count) == (["a", "b", "c"], 4)


# ── retry ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_prompt(request):
    """Each prompt ends in the way that its first word says."""
    word = request.prompt.split()[0]
    if word == "failed":
        return fail(400)
    if word == "partial":
        return say("cut", reasoning="r", finish_reason="length")
    return no_reasoning(request) if word == "discarded" else one_turn(request)


ENDINGS = ["completed", "partial", "failed", "discarded"]


@pytest.mark.parametrize(
    ("retry", "again"),
    [
        (None, ["failed"]),
        ("none", []),
        ("partial", ["partial"]),
        ("failed,discarded", ["failed", "discarded"]),
        ("ids:0", ["completed"]),
        ("failed,ids:0-1", ["completed", "partial", "failed"]),
    ],
)
async def test_retry_chooses_what_is_run_again(start_server, retry, again):
    server = await start_server(by_prompt)
    await run_inline(server.base_url, ENDINGS)
    del server.requests[:]
    run = await run_inline(server.base_url, resume=True, **({} if retry is None else {"retry": retry}))
    assert server.prompts == again
    assert (run.samples["completed"], run.samples["partial"], run.samples["failed"]) == (1, 1, 1)


async def test_the_new_row_replaces_the_old_one_which_stays_in_its_shard(start_server, capsys):
    server = await start_server(by_prompt)
    run = await run_inline(server.base_url, ["partial", "completed"])
    before = (run.path / "batch_0.jsonl").read_bytes()
    server.script = one_turn
    await run_inline(server.base_url, resume=True, retry="partial")
    assert [(row["outcome"], row["attempt"]) for row in run.rows] == [("completed", 1), ("completed", 2)]
    assert (run.path / "batch_0.jsonl").read_bytes() == before
    statistics = run.json("statistics.json")
    assert (statistics["rows_left_behind"]["superseded"], statistics["api_calls"]) == (1, 3)
    assert "Replaced by a later attempt, and kept in their files: 1 row" in capsys.readouterr().out


async def test_a_retry_that_fails_loses_nothing(start_server):
    server = await start_server(by_prompt)
    await run_inline(server.base_url, ["partial"])
    server.script = lambda request: fail(400)
    run = await run_inline(server.base_url, resume=True, retry="partial")
    assert (run.row["outcome"], run.samples["partial"], run.samples["failed"]) == ("partial", 1, 0)
    assert len(run.lines("failed.jsonl")) == 1


async def test_an_interrupted_retry_goes_on_where_it_stopped(start_server):
    server = await start_server(by_prompt)
    prompts = [f"partial {n}" for n in range(4)]
    await run_inline(server.base_url, prompts, batch_size=1)
    del server.requests[:]

    def third_never_answers(request):
        return say("late", delay_s=3600) if request.prompt == prompts[2] else by_prompt(request)

    server.script = third_never_answers
    running = asyncio.create_task(run_inline(server.base_url, resume=True, retry="partial", num_workers=1))
    while len(server.requests) < 3:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.script = by_prompt
    run = await run_inline(server.base_url, resume=True, retry="partial", num_workers=1)
    assert server.prompts == [prompts[0], prompts[1], prompts[2], prompts[2], prompts[3]]
    assert (len(run.rows), run.json("statistics.json")["rows_left_behind"]["superseded"]) == (4, 4)
    await run_inline(server.base_url, resume=True, retry="partial", num_workers=1)
    assert len(server.requests) == 9  # a new retry, of all four


@pytest.mark.parametrize("typed", ["fail", "3", "ids:x", "ids:9-3", "none,failed", "ids:0-999999"])
def test_a_choice_that_is_none_is_refused(typed):
    with pytest.raises(ConfigError, match="retry"):
        read_retry(typed)


async def test_an_index_that_the_dataset_does_not_have_is_refused(server):
    await run_inline(server.base_url, ["a", "b"])
    with pytest.raises(ConfigError, match="there is no prompt 2; the dataset has 2, from 0"):
        await run_inline(server.base_url, resume=True, retry="ids:0-2")


def test_ids_are_indices_ranges_and_hashes():
    chosen = read_retry(f"discarded,ids:3,5-7,{'ab' * 16}")
    assert (chosen.kinds, chosen.indices, chosen.hashes) == ({"discarded"}, {3, 5, 6, 7}, {b"\xab" * 16})


# ── starting over, and who holds the folder ───────────────────────────────────────────────────────────────────────


async def test_start_over_moves_the_former_run_aside(server, capsys):
    first = await run_inline(server.base_url, ["a"])
    kept = first.row
    run = await run_inline(server.base_url, ["b"], start_over=True)
    assert run.prompts == ["b"]
    (aside,) = Path("data").glob("run.before_*")
    assert read_jsonl(aside / "trajectories.jsonl") == [kept]
    assert f"The former run is now in {aside}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--start_over contradicts --resume"):
        await run_inline(server.base_url, resume=True, start_over=True)


async def test_start_over_leaves_a_run_alone_that_is_going_on(server):
    folder = RunFolder(Path("data/run"))
    folder.open()
    write_jsonl(folder.shard(0), [make_row("a")])
    with pytest.raises(ConfigError, match=r"is in use by process \d+ on .*, started at \d{4}-"):
        await run_inline(server.base_url, ["a"], start_over=True)
    folder.close()


async def test_a_lock_that_was_left_behind_is_no_obstacle_and_is_told(server, capsys):
    run = await run_inline(server.base_url, ["a"])
    owner = {"pid": 1, "host": "elsewhere", "started_at": "2026-01-30 10:00:00"}
    (run.path / ".lock_owner").write_bytes(orjson.dumps(owner))
    await run_inline(server.base_url, resume=True)
    assert (
        "The last start (process 1 on elsewhere, started at 2026-01-30 10:00:00) did not end" in capsys.readouterr().err
    )
    assert not (run.path / ".lock_owner").exists()


# ── derived files ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut"])
@pytest.mark.parametrize("name", ["trajectories.jsonl", "checkpoint.json", "statistics.json", "run.json", "run.log"])
async def test_a_derived_file_that_is_lost_comes_back_without_a_model_call(start_server, name, damage):
    server = await start_server(by_prompt)
    run = await run_inline(server.base_url, ["completed", "partial", "discarded"])
    path = run.path / name
    before = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "emptied" else before[: len(before) // 2])
    await run_inline(server.base_url, resume=True)
    assert server.count == 3
    if name == "trajectories.jsonl":
        assert path.read_bytes() == before
    elif name == "checkpoint.json":
        assert run.json(name)["completed_prompts"] == orjson.loads(before)["completed_prompts"]
        assert run.json(name)["batch_stats"] == orjson.loads(before)["batch_stats"]
    elif name == "statistics.json":
        changing = ("duration_s", "starts")
        assert {k: v for k, v in run.json(name).items() if k not in changing} == {
            k: v for k, v in orjson.loads(before).items() if k not in changing
        }
    else:
        assert all(isinstance(line, dict) for line in read_jsonl(run.path / "run.log"))
        assert run.json("run.json")["dataset"]["samples"] == 3


async def test_a_price_given_now_prices_the_rows_of_before(server):
    await run_inline(server.base_url, ["a", "b"], max_samples=1)
    limits = {"max_cost_usd": 5, "price_per_mtok": "10,50"}
    run = await run_inline(server.base_url, resume=True, max_samples=2, **limits)
    assert (run.prompts, server.count) == (["a", "b"], 2)


# ── odd folders ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_that_was_moved_goes_on_where_it_is_now(server):
    await run_inline(server.base_url, ["a", "b"], max_samples=1, output_dir="first")
    Path("data").mkdir()
    Path("first/run").rename("data/run")
    ended = await command("--run_name=run", "--resume", "--max_samples=none")
    assert (ended.code, server.count) == (0, 2), ended.stderr
    assert not Path("first/run").exists()


@pytest.mark.parametrize("number", [1_700_000_000, 2**60])
async def test_a_batch_number_that_no_shard_could_have_is_not_gone_on_from(server, number):
    Path("data/run").mkdir(parents=True)
    row = make_row("other")
    row["metadata"]["batch_num"] = number
    write_jsonl(Path("data/run/batch_3.jsonl"), [row])
    run = await run_inline(server.base_url, ["other", "a"], resume=True)
    assert (run.samples["completed"], server.prompts) == (2, ["a"])
    assert (run.path / "batch_4.jsonl").exists()
    await run_inline(server.base_url, resume=True)
    assert server.count == 1


async def test_rows_count_by_their_outcome_whatever_file_they_stand_in(start_server):
    server = await start_server(by_prompt)
    run = await run_inline(server.base_url, ["completed", "failed"], batch_size=1)
    shard, failed = run.path / "batch_0.jsonl", run.path / "failed.jsonl"
    rows, failures = shard.read_bytes(), failed.read_bytes()
    shard.write_bytes(failures)
    failed.write_bytes(rows)
    await run_inline(server.base_url, resume=True, retry="none")
    assert (run.prompts, run.samples["failed"], run.samples["pending"]) == (["completed"], 1, 0)


async def test_absurd_numbers_and_damaged_starts_keep_no_run_from_its_end(server):
    run = await run_inline(server.base_url, ["a", "b"])
    shard = run.path / "batch_0.jsonl"
    absurd = [row | {"api_calls": 2**63, "reasoning_turns": 2**63} for row in read_jsonl(shard)]
    write_jsonl(shard, absurd)
    content = run.json("run.json")
    content["starts"] = [{"duration_s": "abc"}, 1, None]
    (run.path / "run.json").write_bytes(orjson.dumps(content))
    await run_inline(server.base_url, resume=True)
    assert (run.samples["completed"], server.count) == (2, 2)


async def test_options_of_another_version_are_passed_over_and_bad_ones_are_told_with_their_file(server):
    run = await run_inline(server.base_url, ["a", "b"], max_samples=1)
    content = run.json("run.json")
    content["options"] |= {"new_option": 1}
    (run.path / "run.json").write_bytes(orjson.dumps(content))
    await run_inline(server.base_url, resume=True, max_samples=2)
    assert server.count == 2
    content["options"] |= {"num_workers": "abc"}
    (run.path / "run.json").write_bytes(orjson.dumps(content))
    with pytest.raises(ConfigError, match=r"data/run/run\.json: --num_workers is 'abc'"):
        await run_inline(server.base_url, resume=True)


async def test_what_is_no_file_is_no_shard(server):
    run = await run_inline(server.base_url, ["a", "b"], max_samples=1)
    os.mkfifo(run.path / "batch_7.jsonl")
    (run.path / "batch_8.jsonl").symlink_to("nowhere")
    await run_inline(server.base_url, resume=True, max_samples=2)
    assert (server.count, (run.path / "batch_9.jsonl").exists()) == (2, True)


async def test_retry_without_resume_is_refused_and_moves_nothing_aside(server):
    await run_inline(server.base_url, ["a"])
    for given in ({"retry": "partial"}, {"accept_changes": True}, {"retry": "ids:99", "start_over": True}):
        with pytest.raises(ConfigError, match="add --resume"):
            await run_inline(server.base_url, **given)
    assert [path.name for path in Path("data").iterdir()] == ["run"]


@pytest.mark.parametrize("retry", ["partial", "failed,partial"])
async def test_how_many_are_run_again_is_told(start_server, capsys, retry):
    server = await start_server(by_prompt)
    await run_inline(server.base_url, [*ENDINGS, "partial 2"])
    await run_inline(server.base_url, resume=True, retry=retry)
    assert "4 of 5 prompts are done, 2 of them are run again" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_a_limit_with_room_for_a_few_more_runs_them(start_server, engine):
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.01}
    server = await start_server(lambda request: say("so", reasoning="r", usage=usage))
    prompts = [f"p{n}" for n in range(20)]
    await run_inline(server.base_url, prompts, max_samples=5, batch_size=1)
    with pytest.raises(LimitReachedError):
        await run_inline(
            server.base_url, resume=True, max_samples=20, batch_size=1, engine=engine, max_cost_usd=0.07, num_workers=4
        )
    assert server.count == 7


@pytest.mark.parametrize("digits", [9, 18, 30])
async def test_whatever_number_a_shard_has_no_row_goes_where_it_is_not_read(server, digits):
    run = await run_inline(server.base_url, ["a", "b"], max_samples=1)
    (run.path / "batch_0.jsonl").rename(run.path / f"batch_{'9' * digits}.jsonl")
    await run_inline(server.base_url, resume=True, max_samples=2)
    assert (sorted(run.prompts), server.count) == (["a", "b"], 2)
    await run_inline(server.base_url, resume=True)
    assert server.count == 2
