"""Resume: a sample is known by its content, and each finished row pays for exactly one sample."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from promptmill.dataset import scan_dataset
from promptmill.resume import DoneRows, match_done
from promptmill.rows import summarise
from tests.rows import foreign_row, make_row, write_dataset


class Run:
    """Datasets in a folder, and the rows that a run made of them."""

    def __init__(self, folder):
        self.folder = folder
        self.done = DoneRows()

    def samples(self, rows):
        dataset = scan_dataset(write_dataset(self.folder, rows))
        samples = [dataset.sample(index) for index in range(len(dataset))]
        dataset.close()
        return samples

    def finish(self, rows, which=None):
        """Finish samples of a dataset: all of them, or those with the given indices."""
        samples = self.samples(rows)
        for index in range(len(samples)) if which is None else which:
            self.done.add_done(summary_of(samples[index]))

    def owed(self, rows):
        """The indices of the samples that a resume on this dataset would run."""
        dataset = scan_dataset(write_dataset(self.folder, rows))
        flags = match_done(dataset, self.done)
        dataset.close()
        return [index for index, is_done in enumerate(flags) if not is_done]


def summary_of(sample):
    row = make_row(
        sample.prompt,
        content_hash=sample.content_hash,
        occurrence=sample.occurrence,
        image=sample.image,
        cwd=sample.cwd,
    )
    return summarise(row)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_nothing_done_owes_everything(run):
    assert not run.done
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
    run.done.add_done(summarise(foreign_row("a")))
    run.done.add_done(summarise(foreign_row("a")))
    assert run.done
    assert run.owed(["b", "a", {"prompt": "a", "image": "i"}, "a"]) == [0, 3]


def test_our_own_row_is_matched_before_that_of_another_program(run):
    run.finish(["a", "a"], [1])
    run.done.add_done(summarise(foreign_row("a")))
    assert run.owed(["a", "a", "a"]) == [2]


def test_a_failed_attempt_is_counted_and_still_owed(run):
    (sample,) = run.samples(["a"])
    run.done.add_failed(summary_of(sample))
    run.done.add_failed(summary_of(sample))
    run.done.add_failed(summarise(foreign_row("a")))
    assert run.done.attempts == {(bytes.fromhex(sample.content_hash), 0): 2}
    assert run.owed(["a"]) == [0]


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
        run.done.add_done(summarise(foreign_row(prompt)))
    edits = data.draw(st.lists(st.sampled_from([0, 1]), min_size=len(then), max_size=len(then)))
    now = [edited(row, 1) if edit else row for row, edit in zip(then, edits, strict=True)] + more
    now = data.draw(st.permutations(now))
    owed = [now[index] for index in run.owed(now)]

    by_content = counted(now, content) - counted([then[index] for index in which], content)
    by_prompt = Counter()
    for (prompt, _image), count in by_content.items():
        by_prompt[prompt] += count
    assert counted(owed, lambda row: row["prompt"]) == by_prompt - Counter(foreign)
