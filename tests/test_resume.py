"""Resume: a sample is known by its content, and each finished row pays for exactly one sample."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from promptmill.dataset import scan_dataset
from promptmill.resume import Fate, select
from promptmill.row_index import Judge, Kind, RowIndex
from tests.rows import KNOWN_TOOLS, foreign_row, make_row, write_dataset, write_jsonl


class Run:
    """Datasets in a folder, and the rows that a run made of them."""

    def __init__(self, folder):
        self.folder = folder
        self.rows = []
        self.failures = []

    def samples(self, rows):
        dataset = scan_dataset(write_dataset(self.folder, rows))
        samples = [dataset.sample(index) for index in range(len(dataset))]
        dataset.close()
        return samples

    def finish(self, rows, which=None):
        """Finish samples of a dataset: all of them, or those with the given indices."""
        samples = self.samples(rows)
        for index in range(len(samples)) if which is None else which:
            self.rows.append(row_of(samples[index]))

    def fail(self, rows, which=None, **changes):
        """The same, but they fail."""
        samples = self.samples(rows)
        for index in range(len(samples)) if which is None else which:
            self.failures.append(row_of(samples[index], outcome="failed_transient", completed=False, **changes))

    def select(self, rows):
        """What a resume on this dataset finds."""
        shard = write_jsonl(self.folder / "batch_0.jsonl", self.rows)
        failed = write_jsonl(self.folder / "failed.jsonl", self.failures)
        index = RowIndex(Judge(KNOWN_TOOLS, keep_no_reasoning=False))
        index.read([shard, failed], lambda _size: None)
        dataset = scan_dataset(write_dataset(self.folder, rows))
        self.keys = [dataset.key(sample) for sample in range(len(dataset))]
        selection = select(dataset, index)
        dataset.close()
        return selection

    def owed(self, rows):
        """The indices of the samples that a resume on this dataset would run."""
        return [index for index, is_done in enumerate(self.select(rows).done()) if not is_done]

    def fates(self, rows):
        """What becomes of each row, and of each failed attempt."""
        by_file = self.select(rows).fates_by_file()
        return [[Fate(fate).name for fate in by_file[self.folder / name]] for name in ("batch_0.jsonl", "failed.jsonl")]


def row_of(sample, **changes):
    return make_row(
        sample.prompt,
        content_hash=sample.content_hash,
        occurrence=sample.occurrence,
        image=sample.image,
        cwd=sample.cwd,
        **changes,
    )


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_nothing_done_owes_everything(run):
    assert run.owed(["a", "b"]) == [0, 1]


@pytest.mark.parametrize(
    ("finished", "which", "now", "owed"),
    [
        ("abc", None, "abc", []),
        ("abc", [0, 2], "abc", [1]),
        ("abc", [0, 1], "cba", [0]),
        ("abc", None, "abxc", [2]),
        ("abc", None, "b", []),
        ("abc", None, "xbz", [0, 2]),
        ("aaa", [0], "aaa", [1, 2]),
        ("aaa", [2], "aaa", [0, 1]),
        ("aaa", [2], "a", []),
        ("aa", None, "aaaa", [2, 3]),
        ("a", None, "bab", [0, 2]),
        ("aaaa", None, "aa", []),
    ],
    ids=["all", "some", "reordered", "grown", "shrunk", "edited", "first of three", "last of three", "only a later one",
         "more copies", "moved", "fewer copies"],
)  # fmt: skip
def test_each_finished_row_pays_for_one_sample_of_the_same_content(run, finished, which, now, owed):
    run.finish(finished, which)
    assert len(run.owed(now)) == len(owed)
    assert [now[index] for index in run.owed(now)] == [now[index] for index in owed]


def test_the_sample_that_ran_is_the_one_that_is_done(run):
    run.finish("aaa", [1])
    assert run.owed("aaa") == [0, 2]


def test_an_edited_further_column_owes_nothing(run):
    run.finish([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}])
    assert run.owed([{"prompt": "a", "id": 9}, "b"]) == []


@pytest.mark.parametrize("changed", [{"prompt": "x"}, {"image": "y"}, {"cwd": "/y"}])
def test_an_edited_prompt_image_or_cwd_is_owed(run, changed):
    row = {"prompt": "a", "image": "i", "cwd": "/w"}
    run.finish([row])
    assert run.owed([row | changed]) == [0]


def test_a_row_claimed_by_its_hash_does_not_also_pay_for_an_edited_one(run):
    run.finish(["a", "a", "a"], [1, 2])
    edited = {"prompt": "a", "id": 1}
    assert len(run.owed(["a", edited, edited])) == 1


def test_rows_of_two_datasets_with_the_same_content_pay_twice(run):
    run.finish(["a"])
    run.finish(["a"])
    assert run.owed(["a", "a", "a"]) == [2]
    assert len(run.owed([{"prompt": "a", "id": 1}] * 3)) == 1


def test_a_row_of_another_program_pays_by_its_prompt(run):
    run.rows += [foreign_row("a"), foreign_row("a")]
    assert run.owed(["b", "a", {"prompt": "a", "image": "i"}, "a"]) == [0, 3]


def test_our_own_row_is_matched_before_that_of_another_program(run):
    run.finish(["a", "a"], [1])
    run.rows.append(foreign_row("a"))
    assert run.owed(["a", "a", "a"]) == [2]


def test_failed_attempts_are_counted_the_last_one_counts_and_the_sample_is_still_owed(run):
    run.fail(["a"])
    run.fail(["a"], attempt=2)
    run.failures.append(foreign_row("a", outcome="refused"))
    selection = run.select(["a", "b"])
    assert selection.attempts_before(0, run.keys[0]) == 2
    assert (selection.kind(0), selection.kind(1)) == (Kind.FAILED, None)
    assert run.owed(["a", "b"]) == [0, 1]
    assert run.fates(["a", "b"]) == [[], ["SUPERSEDED", "COUNTS", "SUPERSEDED"]]


def test_a_later_attempt_takes_the_place_of_a_row_wherever_it_stands(run):
    run.finish(["a", "b"])
    run.rows.insert(0, run.rows[0] | {"attempt": 2})
    assert run.owed(["a", "a", "b"]) == [1]
    assert run.fates(["a", "a", "b"])[0] == ["COUNTS", "SUPERSEDED", "COUNTS"]
    assert run.select(["a", "a", "b"]).attempts_before(0, run.keys[0]) == 2


def test_a_failed_attempt_never_takes_the_place_of_a_row(run):
    run.finish(["a"])
    run.fail(["a"], attempt=2)
    assert run.owed(["a"]) == []
    assert run.fates(["a"]) == [["COUNTS"], ["SUPERSEDED"]]
    assert run.select(["a"]).attempts_before(0, run.keys[0]) == 2


def test_rows_of_samples_that_the_dataset_has_lost_count_for_nothing(run):
    run.finish(["a", "b"])
    run.fail(["c"])
    assert run.fates(["b"]) == [["NOT_IN_DATASET", "COUNTS"], ["NOT_IN_DATASET"]]
    assert run.fates(["b", "c", "a"]) == [["COUNTS", "COUNTS"], ["COUNTS"]]


def test_matching_does_not_use_the_rows_up(run):
    run.finish("ab", [0])
    assert run.owed("ab") == run.owed("ab") == [1]


def content(row):
    return row["prompt"], row.get("image", "")


def counted(rows, key):
    return Counter(map(key, rows))


def edited(row, number):
    return row | {"n": number}


rows = st.sampled_from([{"prompt": "a"}, {"prompt": "a", "image": "i"}, {"prompt": "b"}])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), then=st.lists(rows, min_size=1, max_size=6), more=st.lists(rows, max_size=3))
def test_what_is_owed_is_the_dataset_less_what_is_done(tmp_path, data, then, more):
    run = Run(tmp_path)
    which = data.draw(st.lists(st.sampled_from(range(len(then))), unique=True))
    run.finish(then, which)
    foreign = data.draw(st.lists(st.sampled_from("ab"), max_size=3))
    for prompt in foreign:
        run.rows.append(foreign_row(prompt))
    edits = data.draw(st.lists(st.sampled_from([0, 1]), min_size=len(then), max_size=len(then)))
    now = [edited(row, 1) if edit else row for row, edit in zip(then, edits, strict=True)] + more
    now = data.draw(st.permutations(now))
    owed = [now[index] for index in run.owed(now)]

    by_content = counted(now, content) - counted([then[index] for index in which], content)
    by_prompt = Counter()
    for (prompt, _image), count in by_content.items():
        by_prompt[prompt] += count
    assert counted(owed, lambda row: row["prompt"]) == by_prompt - Counter(foreign)
