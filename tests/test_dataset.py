"""The dataset: which lines are samples, what is said of the others, and what a sample carries."""

import os
from hashlib import sha256
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from promptmill.batches import make_batches
from promptmill.dataset import scan_dataset
from promptmill.errors import DatasetError, RunStoppedError
from tests.rows import write_dataset


@pytest.fixture
def scan(tmp_path):
    """Writes a dataset and scans it; closed at the end."""
    opened = []

    def write_and_scan(content, **rest):
        path = tmp_path / "prompts.jsonl"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_dataset(tmp_path, content)
        opened.append(scan_dataset(path, **rest))
        return opened[-1]

    yield write_and_scan
    for dataset in opened:
        dataset.close()


def prompts(dataset):
    return [dataset.sample(index).prompt for index in range(len(dataset))]


def skipped(dataset):
    return {line.line_number: line.reason for line in dataset.skipped}


A, B = b'{"prompt": "a"}', b'{"prompt": "b"}'


@pytest.mark.parametrize(
    "content",
    [
        A + b"\n" + B + b"\n",
        A + b"\n" + B,
        b"\xef\xbb\xbf" + A + b"\n" + B + b"\n",
        A + b"\r\n" + B + b"\r\n",
        b"\n\n" + A + b"\n  \t\r\n\n" + B + b"\n\n",
        b"  " + A + b"  \n" + B + b"\n",
    ],
    ids=["plain", "no last newline", "BOM", "CRLF", "blank lines", "spaces"],
)
def test_the_samples_are_the_same_however_the_lines_are_written(scan, content):
    dataset = scan(content)
    assert prompts(dataset) == ["a", "b"]
    assert dataset.skipped == []
    assert [dataset.sample(index).index for index in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b'"a"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", 'no "prompt" field'),
        (b'{"Prompt": "a"}', 'no "prompt" field'),
        (b'{"prompt": null}', '"prompt" is not text'),
        (b'{"prompt": 3}', '"prompt" is not text'),
        (b'{"prompt": ["a"]}', '"prompt" is not text'),
        (b'{"prompt": ""}', '"prompt" is empty'),
        (b'{"prompt": " \\n\\u00a0"}', '"prompt" is empty'),
        (b'{"prompt": "a", "image": 3}', '"image" is not text'),
        (b'{"prompt": "a", "cwd": ["/"]}', '"cwd" is not text'),
        (b'{"prompt": "a", "x": ' + b"[" * 600 + b"]" * 600 + b"}", "nested too deeply"),
    ],
)
def test_a_line_that_is_no_sample_is_skipped_with_its_number_and_reason(scan, line, reason):
    dataset = scan(b"\n" + A + b"\n" + line + b"\n" + B + b"\n")
    assert prompts(dataset) == ["a", "b"]
    assert list(skipped(dataset)) == [3]
    assert skipped(dataset)[3].startswith(reason)


def test_a_dataset_without_a_sample_is_refused_and_shows_the_first_reasons(scan):
    with pytest.raises(DatasetError) as refusal:
        scan([b"[]"] * 12)
    assert "\n  line 10: not a JSON object" in str(refusal.value)
    assert "line 11" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_dataset_is_refused(scan, content):
    with pytest.raises(DatasetError, match="no usable row"):
        scan(content)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, complaint in (("nowhere", "does not exist"), ("pipe", "no regular file"), (".", "no regular file")):
        with pytest.raises(DatasetError, match=complaint):
            scan_dataset(tmp_path / name)


def test_a_file_that_cannot_be_read_is_refused():
    unreadable_even_for_root = Path("/proc/self/mem")
    with pytest.raises(DatasetError, match=r"cannot read it \(Input/output error\)"):
        scan_dataset(unreadable_even_for_root)


def test_max_samples_is_the_first_valid_rows_and_the_rest_is_only_counted(scan):
    read = []
    dataset = scan([b"{", "a", b"[]", "b", "c", b" ", b"{"], max_samples=2, advance=read.append)
    assert prompts(dataset) == ["a", "b"]
    assert list(skipped(dataset)) == [1, 3]
    assert (dataset.invalid, dataset.not_selected) == (2, 2)
    assert len(read) == 7
    assert len(scan(["a", "b"], max_samples=9)) == 2


def test_max_samples_leaves_a_large_file_unread(tmp_path):
    path = write_dataset(tmp_path, ["a"])
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte without newline, which no test would survive reading
    dataset = scan_dataset(path, max_samples=1)
    assert prompts(dataset) == ["a"]
    assert dataset.uncounted_bytes > 1 << 39
    dataset.close()


def test_advance_is_told_every_byte(scan, tmp_path):
    read = []
    scan(b"\xef\xbb\xbf" + A + b"\r\n\n{\n" + B, advance=read.append)
    assert sum(read) == (tmp_path / "prompts.jsonl").stat().st_size


def test_the_fingerprint_is_that_of_the_bytes_read(scan):
    assert scan(A + b"\n" + B).fingerprint == sha256(A + b"\n" + B).hexdigest()
    assert scan(A + b"\n" + B, max_samples=1).fingerprint == sha256(A + b"\n").hexdigest()


def test_a_repeated_row_is_told_apart_by_its_occurrence(scan):
    dataset = scan(["a", "b", "a", "a"])
    samples = [dataset.sample(index) for index in range(4)]
    assert [sample.occurrence for sample in samples] == [0, 0, 1, 2]
    assert len({sample.content_hash for sample in samples}) == 2
    assert len({dataset.key(index) for index in range(4)}) == 4


def test_identity_is_the_content_whatever_the_spacing_order_and_escapes(scan):
    dataset = scan(
        b'{"prompt": "\xc3\xa9", "x": {"b": 1, "a": 2}}\n{"x":{"a":2,"b":1},"prompt":"\\u00e9"}\n'
        b'{"prompt": "\xc3\xa9", "x": {"b": 1, "a": 3}}\n'
    )
    assert dataset.sample(0).content_hash == dataset.sample(1).content_hash
    assert dataset.sample(0).content_hash != dataset.sample(2).content_hash


def test_image_docker_image_cwd_and_further_columns_are_carried(scan):
    dataset = scan(
        [
            {"prompt": "a", "image": "x", "docker_image": "y", "cwd": "/w", "id": 7, "tags": ["é", None]},
            {"prompt": "a", "docker_image": "y"},
            {"prompt": "a", "image": None, "docker_image": "", "cwd": None},
        ]
    )
    first, second, third = (dataset.sample(index) for index in range(3))
    assert (first.image, first.cwd) == ("x", "/w")
    assert orjson.loads(first.extra_json) == {"id": 7, "tags": ["é", None]}
    assert (second.image, second.cwd, second.extra_json) == ("y", "", "{}")
    assert (third.image, third.cwd) == ("", "")


def test_a_file_that_was_edited_after_the_scan_stops_the_run(scan, tmp_path):
    dataset = scan(A + b"\n" + B + b"\n")
    assert dataset.sample(1).prompt == "b"
    with (tmp_path / "prompts.jsonl").open("r+b") as file:
        file.seek(len(A) + 1)
        file.write(B.replace(b'"b"', b'"c"'))
    assert dataset.sample(0).prompt == "a"
    with pytest.raises(RunStoppedError, match="was changed while the run was reading it"):
        dataset.sample(1)
    (tmp_path / "prompts.jsonl").write_bytes(b"")
    with pytest.raises(RunStoppedError):
        dataset.sample(0)


def test_a_replaced_file_does_not_touch_the_run_that_reads_the_old_one(scan, tmp_path):
    dataset = scan(["a", "b"])
    write_dataset(tmp_path, ["c"], name="new.jsonl").replace(tmp_path / "prompts.jsonl")
    assert prompts(dataset) == ["a", "b"]


def test_a_long_line_is_a_line(scan):
    long = "x" * 3_000_000
    dataset = scan([long, "b"])
    assert prompts(dataset) == [long, "b"]


CHARACTERS = st.characters(exclude_categories=["Cs"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARACTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
dataset_rows = st.builds(
    lambda prompt, extra: (
        {name: value for name, value in extra.items() if name not in ("image", "docker_image", "cwd")}
        | {"prompt": prompt}
    ),
    st.text(CHARACTERS, min_size=1).filter(str.strip),
    st.dictionaries(st.text(CHARACTERS, max_size=6), json_values, max_size=3),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(dataset_rows, min_size=1, max_size=8), blank=st.sampled_from([b"", b"\n", b"\r\n \n"]))
def test_every_row_comes_back_as_it_was_written(tmp_path, rows, blank):
    path = write_dataset(tmp_path, [orjson.dumps(row) + blank for row in rows])
    dataset = scan_dataset(path)
    samples = [dataset.sample(index) for index in range(len(dataset))]
    dataset.close()
    assert dataset.skipped == []
    assert [orjson.loads(s.extra_json) | {"prompt": s.prompt} for s in samples] == rows
    assert len({(s.content_hash, s.occurrence) for s in samples}) == len(rows)


def test_batches_hold_the_owed_samples_in_order_and_know_their_attempt(scan):
    dataset = scan(list("abcdefg"))
    before = {3: 2}
    batches = list(
        make_batches(dataset, [0, 2, 3, 5, 6], batch_size=2, first_number=7, attempts_before=lambda n: before.get(n, 0))
    )
    assert [batch.number for batch in batches] == [7, 8, 9]
    assert [[s.prompt for s in batch.samples] for batch in batches] == [["a", "c"], ["d", "f"], ["g"]]
    assert [s.attempt for batch in batches for s in batch.samples] == [1, 1, 3, 1, 1]


def test_a_json_array_is_refused_whole(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text('[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n')
    with pytest.raises(DatasetError, match="is a JSON array and not JSONL"):
        scan_dataset(path)


def test_the_first_line_of_each_working_folder_is_known(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "cwd": "/x"}\n{"prompt": "c", "cwd": "/x"}\n')
    dataset = scan_dataset(path)
    dataset.close()
    assert dataset.first_line_by_cwd == {"/x": 2}
