"""The merge: which rows of a run folder end up in `trajectories.jsonl`, in which order, and how they are counted."""

import orjson
import pytest

from promptmill.merge import MergeSources, merge
from promptmill.resume import select
from promptmill.row_index import Judge, RowIndex
from promptmill.rows import MAX_COUNT
from promptmill.run_folder import RunFolder
from promptmill.statistics import RunFacts, statistics_json
from tests.rows import KNOWN_TOOLS, foreign_row, make_row, prompts_in, read_jsonl, write_jsonl
from tests.test_shards import in_a_process_with_file_limit

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "reasoning_tokens": 1, "cached_tokens": 0, "reported_calls": 1}


class Folder:
    """A run folder's row files, written by hand."""

    def __init__(self, path):
        self.path = path
        self.run = RunFolder(path)

    def shard(self, number, *rows):
        write_jsonl(self.run.shard(number), rows)

    def discarded(self, *rows):
        write_jsonl(self.run.discarded, [row | {"outcome": "discarded", "error": "discarded"} for row in rows])

    def failed(self, *rows):
        write_jsonl(self.run.failed, rows)

    def merge(self, *, keep_no_reasoning=False, **rest):
        index = RowIndex(Judge(KNOWN_TOOLS, keep_no_reasoning))
        index.read(self.run.row_files(), lambda _size: None)
        sources = MergeSources(
            shards=self.run.shards(),
            discarded=self.run.discarded,
            failed=self.run.failed,
            known_tools=KNOWN_TOOLS,
            keep_no_reasoning=keep_no_reasoning,
            fates=select(None, index).fates_by_file(),
        )
        return merge(sources, self.run.trajectories, **rest)

    @property
    def prompts(self):
        return prompts_in(self.run.trajectories)

    @property
    def rows(self):
        return read_jsonl(self.run.trajectories)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def failure(prompt, **changes):
    return make_row(prompt, outcome="failed_transient", completed=False, stop_reason="provider_failed", **changes)


def silent(prompt, **changes):
    """A row without reasoning."""
    return make_row(prompt, answer="done", **changes)


def test_rows_come_in_the_order_of_shards_by_number_and_of_lines(folder):
    folder.shard(10, make_row("d"))
    folder.shard(2, make_row("b"), make_row("c"))
    folder.shard(0, make_row("a"))
    folder.merge()
    assert folder.prompts == ["a", "b", "c", "d"]


def test_nothing_to_merge_is_an_empty_file(folder):
    assert folder.merge().statistics.merged == 0
    assert folder.run.trajectories.read_bytes() == b""


def test_lines_that_are_no_rows_are_left_out_and_counted(folder):
    folder.shard(0, make_row("a"), b"{torn", b"[]", b"\0\0", b'{"conversations": 1}', make_row("b"))
    with folder.run.shard(0).open("ab") as file:
        file.write(b'{"conversations": [')
    result = folder.merge()
    assert folder.prompts == ["a", "b"]
    assert result.unreadable_lines == 4


def test_merging_again_gives_the_same_file_and_replaces_the_old_one(folder):
    folder.shard(0, make_row("a"), foreign_row("b"))
    folder.run.trajectories.write_bytes(b"old")
    folder.merge()
    first = folder.run.trajectories.read_bytes()
    folder.merge()
    assert folder.run.trajectories.read_bytes() == first
    assert folder.prompts == ["a", "b"]


def test_our_own_row_is_merged_as_it_is(folder):
    row = make_row("é\u2028", tools={"terminal": (1, 1)})
    folder.shard(0, row)
    folder.merge()
    assert folder.rows == [row]
    assert list(folder.rows[0]) == list(row)


def test_a_filtered_row_stays_in_its_shard_and_is_counted_with_its_reason(folder):
    folder.shard(0, make_row("a"), make_row("b", unknown_tools=["teleport"]), silent("c"))
    before = folder.run.shard(0).read_bytes()
    statistics = folder.merge().statistics
    assert folder.prompts == ["a"]
    assert folder.run.shard(0).read_bytes() == before
    assert statistics.left_out == {"hallucinated_tool": 1}
    assert (statistics.merged, statistics.outcomes["discarded"], statistics.done) == (1, 1, 3)


def test_discarded_rows_are_left_out(folder):
    folder.shard(0, make_row("a"))
    folder.discarded(silent("b"))
    statistics = folder.merge().statistics
    assert folder.prompts == ["a"]
    assert (statistics.merged, statistics.outcomes["discarded"]) == (1, 1)


def test_discarded_rows_come_last_and_as_if_never_discarded_when_they_are_kept(folder):
    folder.discarded(silent("b"), silent("c", completed=False, partial=True, stop_reason="max_turns"))
    folder.shard(0, make_row("a"))
    statistics = folder.merge(keep_no_reasoning=True).statistics
    assert folder.prompts == ["a", "b", "c"]
    assert [row["outcome"] for row in folder.rows] == ["completed", "completed", "partial"]
    assert [row["error"] for row in folder.rows] == ["", "", ""]
    assert statistics.outcomes == {"completed": 2, "partial": 1}


def test_a_discarded_row_that_called_an_unknown_tool_is_not_kept(folder):
    folder.discarded(silent("b", unknown_tools=["teleport"]))
    assert folder.merge(keep_no_reasoning=True).statistics.left_out == {"hallucinated_tool": 1}
    assert folder.prompts == []


def test_a_foreign_row_gets_every_key_and_every_row_gets_its_tools(folder):
    browser = {"count": 2, "success": 1, "failure": 1}
    folder.shard(0, make_row("a", tools={"terminal": (1, 0)}))
    folder.shard(1, foreign_row("b", tool_stats={"browser_click": browser, "terminal": browser}))
    result = folder.merge()
    ours, foreign = folder.rows
    assert list(ours) == list(foreign)
    assert result.tool_names == (*KNOWN_TOOLS, "browser_click")
    assert [list(row[key]) for row in (ours, foreign) for key in ("tool_stats", "tool_error_counts")] == [
        list(result.tool_names)
    ] * 4
    assert foreign["tool_stats"]["browser_click"] == browser
    assert foreign["tool_error_counts"] == {"terminal": 1, "read_file": 0, "browser_click": 1}
    assert ours["tool_stats"]["browser_click"] == {"count": 0, "success": 0, "failure": 0}
    assert result.statistics.merged == 2


def test_a_tool_that_one_foreign_row_merely_lists_does_not_excuse_another_that_calls_it(folder):
    unused, used = ({"count": count, "success": count, "failure": 0} for count in (0, 1))
    folder.shard(0, foreign_row("a", tool_stats={"teleport": unused}), foreign_row("b", tool_stats={"teleport": used}))
    assert folder.merge().statistics.left_out == {"hallucinated_tool": 1}
    assert folder.prompts == ["a"]


def test_a_left_out_rows_tools_make_no_columns(folder):
    folder.shard(0, make_row("a"), foreign_row("b", tool_stats={"teleport": {"count": 1, "success": 0, "failure": 1}}))
    assert folder.merge().tool_names == KNOWN_TOOLS


def test_a_sample_that_failed_and_then_was_done_counts_once_and_costs_both(folder):
    folder.failed(failure("a", usage=USAGE), failure("b", usage=USAGE), failure("b", usage=USAGE))
    folder.shard(1, make_row("a", usage=USAGE))
    statistics = folder.merge().statistics
    assert (statistics.merged, statistics.failed) == (1, 1)
    assert statistics.stop_reasons == {"answer": 1, "provider_failed": 1}
    assert statistics.usage.prompt_tokens == 40
    assert statistics.api_calls == 4


def test_equal_prompts_are_told_apart_by_their_occurrence(folder):
    folder.failed(failure("a", occurrence=0), failure("a", occurrence=1))
    folder.shard(1, make_row("a", occurrence=1))
    assert folder.merge().statistics.failed == 1


def test_the_class_of_a_failure_is_that_of_its_last_attempt(folder):
    folder.failed(failure("a"), make_row("a", outcome="refused", completed=False))
    assert folder.merge().statistics.outcomes == {"refused": 1}


def test_the_totals_reconcile(folder):
    folder.shard(
        0, make_row("a", tools={"terminal": (2, 1)}), make_row("b", outcome="partial", stop_reason="max_turns")
    )
    folder.shard(1, make_row("c", unknown_tools=["teleport"]), b"{torn")
    folder.discarded(silent("d"))
    folder.failed(failure("e"), failure("a"))
    result = folder.merge()
    starts = [{"duration_s": 1.5}, {"duration_s": 2}]
    unreadable = result.unreadable_lines
    facts = RunFacts("my_run", samples=8, not_selected=2, invalid=3, starts=starts, unreadable_lines=unreadable)
    totals = statistics_json(result.statistics, facts, result.tool_names)
    samples = totals["samples"]
    assert samples == {
        "dataset_rows": 13, "completed": 1, "partial": 1, "discarded_no_reasoning": 1, "filtered": 1, "failed": 1,
        "pending": 3, "not_selected": 2, "invalid": 3,
    }  # fmt: skip
    assert sum(samples.values()) == 2 * samples["dataset_rows"]
    assert totals["rows_left_behind"] == {"superseded": 0, "not_in_dataset": 0, "unreadable_lines": 1}
    assert totals["merged_rows"] == len(folder.rows) == samples["completed"] + samples["partial"]
    assert sum(totals["failed_by_class"].values()) == samples["failed"]
    assert sum(totals["filtered_by_reason"].values()) == samples["filtered"]
    assert totals["tool_usage"]["terminal"] == {"count": 3, "success": 2, "failure": 1, "success_percent": 66.67}
    assert totals["tool_usage"]["read_file"] == {"count": 0, "success": 0, "failure": 0, "success_percent": 0.0}
    assert totals["unknown_tools"] == {"teleport": 1}
    reasoning = totals["reasoning"]
    assert (reasoning["assistant_turns"], reasoning["turns_with_reasoning"]) == (4, 3)
    assert reasoning["coverage_percent"] == 75.0
    assert totals["duration_s"] == 3.5


def test_statistics_of_nothing_divide_by_nothing(folder):
    facts = RunFacts(run_name="my_run", samples=2, not_selected=0, invalid=0, starts=[])
    totals = statistics_json(folder.merge().statistics, facts, KNOWN_TOOLS)
    assert totals["samples"]["pending"] == 2
    assert totals["reasoning"]["coverage_percent"] == 0.0


def test_a_disk_that_refuses_leaves_the_old_file(folder):
    folder.shard(0, make_row("a"))
    folder.merge()
    before = folder.run.trajectories.read_bytes()
    folder.shard(1, *[make_row("b")] * 200)
    in_a_process_with_file_limit(
        100_000,
        "from tests.test_merge import Folder\n"
        "try:\n    Folder(Path(sys.argv[1])).merge()\n"
        "except StorageError:\n    pass\nelse:\n    sys.exit('nothing was refused')",
        folder.path,
    )
    assert folder.run.trajectories.read_bytes() == before


def test_advance_is_told_the_bytes_of_every_row_file(folder):
    folder.shard(0, make_row("a"), make_row("b"))
    folder.discarded(silent("c"))
    folder.failed(failure("d"))
    read = []
    folder.merge(advance=read.append)
    assert sum(read) == sum(path.stat().st_size for path in folder.run.row_files())


def test_a_row_nested_beyond_all_bounds_is_counted_and_the_others_are_merged(folder):
    nested = b'{"a":' * 400 + b"1" + b"}" * 400
    row = orjson.dumps(make_row("a")).replace(b'"metadata":{', b'"metadata":{"deep":' + nested + b",", 1)
    with folder.run.shard(0).open("wb") as shard:
        shard.write(row + b"\n" + orjson.dumps(make_row("b")) + b"\n")
    result = folder.merge()
    assert (result.unreadable_lines, result.statistics.merged) == (1, 1)


def test_an_absurd_count_spoils_no_sum(folder):
    usage = make_row("a")["usage"] | {"prompt_tokens": 2**63 - 1}
    folder.shard(0, make_row("a", usage=usage), make_row("b", usage=usage))
    assert folder.merge().statistics.usage.prompt_tokens == 2 * MAX_COUNT
