"""The third door: verbs over a run folder, as a person types them, on real files."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from promptmill.__main__ import main
from promptmill.exports import EXPORTS
from promptmill.exports.hermes_reader import read_back
from promptmill.rows import DOCUMENTED_KEYS
from promptmill.run_folder import RunFolder
from promptmill.verbs import VERBS
from tests.fakes.model_server import REPOSITORY
from tests.rows import foreign_row, make_row, prompts_in, read_jsonl, write_jsonl

RUN = Path("data/my_run")
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}


def command(*argv):
    return [sys.executable, "-W", "error", "-m", "promptmill", *map(str, argv)]


def type_in(*argv):
    """Run the door in the present folder."""
    return subprocess.run(command(*argv), capture_output=True, text=True, env=ENVIRONMENT, check=False)


def obeyed(*argv):
    done = type_in(*argv)
    assert done.returncode == 0, done.stderr
    return done


def refused(*argv, code=2):
    done = type_in(*argv)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def run():
    """A run of two shards, not yet merged: rows a to d, one discarded, one failed, one line that is no row."""
    write_jsonl(RUN / "batch_2.jsonl", [make_row("a"), b'{"no": "row"}', make_row("b")])
    write_jsonl(
        RUN / "batch_10.jsonl", [foreign_row("c"), make_row("d", outcome="partial", completed=False, partial=True)]
    )
    write_jsonl(RUN / "discarded.jsonl", [make_row("e", answer="silent", outcome="discarded", stop_reason="answer")])
    write_jsonl(RUN / "failed.jsonl", [make_row("f", outcome="refused", stop_reason="refused", completed=False)])
    return RUN


def write_run_json(**options):
    (RUN / "run.json").write_bytes(
        orjson.dumps(
            {
                "run_name": "named",
                "options": {"keep_no_reasoning": False} | options,
                "dataset": {"samples": 9, "invalid": 1, "skipped": [{"line_number": 3, "reason": "no prompt"}]},
                "starts": [{"started_at": "2026-01-30T10:00:00.123456", "duration_s": 2.5}],
            }
        )
    )


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ── merge ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_merge_rebuilds_rows_and_statistics_from_the_shards(run):
    write_run_json()
    done = obeyed("merge", run)
    assert prompts_in(run / "trajectories.jsonl") == ["a", "b", "c", "d"]
    statistics = orjson.loads((run / "statistics.json").read_bytes())
    assert (statistics["run_name"], statistics["duration_s"], len(statistics["starts"])) == ("named", 2.5, 1)
    assert statistics["samples"] == {
        "dataset_rows": 10, "completed": 3, "partial": 1, "discarded_no_reasoning": 1, "filtered": 0, "failed": 1,
        "pending": 3, "not_selected": 0, "invalid": 1,
    }  # fmt: skip
    assert statistics["rows_left_behind"]["unreadable_lines"] == 1
    assert "4 rows in data/my_run/trajectories.jsonl" in done.stdout
    assert "No readable row, and left out: 1 line" in done.stdout


def test_merge_keeps_what_the_run_was_told_to_keep(run):
    write_run_json(keep_no_reasoning=True)
    obeyed("merge", run)
    assert prompts_in(run / "trajectories.jsonl") == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"options": 1, "dataset": null, "starts": {}}'])
def test_merge_without_a_usable_run_json_counts_the_rows(run, content):
    if content is not None:
        (run / "run.json").write_bytes(content)
    obeyed("merge", run)
    statistics = orjson.loads((run / "statistics.json").read_bytes())
    assert statistics["run_name"] == "my_run"
    assert (statistics["samples"]["dataset_rows"], statistics["samples"]["pending"]) == (6, 0)


def test_merge_leaves_out_a_torn_line_and_says_so(run):
    with (run / "batch_10.jsonl").open("ab") as file:
        file.write(orjson.dumps(make_row("torn"))[:-9])
    before = content_of(run)
    done = obeyed("merge", run)
    assert "data/my_run/batch_10.jsonl: the last line is torn" in done.stderr
    assert prompts_in(run / "trajectories.jsonl") == ["a", "b", "c", "d"]
    assert before.items() <= content_of(run).items()


def test_merging_twice_gives_the_same_bytes(run):
    obeyed("merge", run)
    before = content_of(run)
    obeyed("merge", run)
    assert content_of(run) == before


def test_merge_leaves_a_run_alone_that_is_being_written(run):
    folder = RunFolder(run)
    folder.open()
    try:
        complaint = refused("merge", run)
    finally:
        folder.close()
    assert f"data/my_run is in use by process {os.getpid()} on " in complaint
    assert not (run / "trajectories.jsonl").exists()


def test_merge_does_not_replace_rows_whose_shards_are_gone():
    rows = write_jsonl(RUN / "trajectories.jsonl", [make_row("a")])
    write_run_json()
    before = rows.read_bytes()
    assert "holds no shards (batch_<number>.jsonl) to merge; nothing was changed" in refused("merge", RUN)
    assert rows.read_bytes() == before


# ── stats ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stats_shows_what_a_merge_would_and_writes_nothing(run):
    write_run_json()
    before = content_of(run)
    shown = obeyed("stats", run).stdout
    assert content_of(run) == before
    assert shown == obeyed("merge", run).stdout
    assert "Run named" in shown


def test_stats_of_a_run_that_is_being_written(run):
    folder = RunFolder(run)
    folder.open()
    try:
        done = obeyed("stats", run)
    finally:
        folder.close()
    assert "`python -m promptmill merge data/my_run` brings in their rows" in done.stderr


def test_stats_takes_another_programs_shards():
    write_jsonl(RUN / "batch_0.jsonl", [foreign_row("a"), foreign_row("b")])
    assert "2 rows in" in obeyed("stats", RUN).stdout


# ── export ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", EXPORTS)
def test_export_writes_every_row_that_was_merged(run, name):
    obeyed("merge", run)
    before = content_of(run)
    done = obeyed("export", run, f"--format={name}")
    assert done.stdout == (
        f"{name}: 4 rows in = 4 rows out + 0 left out\nwritten to data/my_run/exports/{name}.jsonl\n"
    )
    assert done.stderr == ""
    assert prompts_in(run / "exports" / f"{name}.jsonl") == ["a", "b", "c", "d"]
    assert before.items() <= content_of(run).items()


def test_export_to_hermes_can_be_read_back(run):
    obeyed("merge", run)
    obeyed("export", run, "--format=hermes", "--output", "out.jsonl")
    assert not (run / "exports").exists()
    (first, *_) = read_jsonl(Path("out.jsonl"))
    assert tuple(first) == DOCUMENTED_KEYS
    said = [
        (message.role, message.content, message.reasoning) for message in read_back(first["conversations"]).messages
    ]
    assert said == [("system", "system", ""), ("user", "a", ""), ("assistant", "done", "r")]


def test_export_says_what_it_left_out_and_why(run):
    odd = make_row("odd", conversations=[{"from": "observation", "value": "x"}])
    rows = write_jsonl(run / "trajectories.jsonl", [make_row("a"), odd, b"[1]", b"nonsense", make_row("b")])
    with rows.open("ab") as file:
        file.write(b'{"prompt_index": 4')
    done = obeyed("export", run, "--format=hermes")
    assert done.stdout.splitlines()[0] == (
        "hermes: 6 rows in = 2 rows out + 4 left out "
        "(2 no readable row, 1 of a shape the format cannot hold, 1 torn last line)"
    )
    assert prompts_in(run / "exports/hermes.jsonl") == ["a", "b"]


def test_export_says_that_shards_hold_newer_rows(run):
    rows = write_jsonl(run / "trajectories.jsonl", [make_row("a")])
    os.utime(rows, (1, 1))
    assert "note: there are shards newer than data/my_run/trajectories.jsonl" in (
        obeyed("export", run, "--format=sharegpt").stderr
    )


def test_export_needs_merged_rows(run):
    complaint = refused("export", run, "--format=hermes")
    assert "it is made when a run ends, or by `python -m promptmill merge data/my_run`" in complaint
    assert not (run / "exports").exists()


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ("data/my_run/trajectories.jsonl", "is among the run's own files"),
        ("data/../data/my_run/new.jsonl", "is among the run's own files"),
        ("data", "is a folder"),
        ("nowhere/out.jsonl", "there is no folder nowhere"),
    ],
)
def test_export_refuses_a_place_where_it_would_do_harm(run, output, complaint):
    obeyed("merge", run)
    before = content_of(run)
    assert complaint in refused("export", run, "--format=hermes", f"--output={output}")
    assert content_of(run) == before


def test_export_keeps_the_old_file_when_the_rows_cannot_be_read(run):
    obeyed("merge", run)
    obeyed("export", run, "--format=hermes", "--output=out.jsonl")
    before = Path("out.jsonl").read_bytes()
    (run / "trajectories.jsonl").unlink()
    (run / "trajectories.jsonl").mkdir()
    complaint = refused("export", run, "--format=hermes", "--output=out.jsonl", code=1)
    assert complaint == "error: data/my_run/trajectories.jsonl: cannot read (Is a directory)\n"
    assert Path("out.jsonl").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["data", "out.jsonl"]


def test_export_takes_names_as_they_are_typed():
    name = "2024_01"
    write_jsonl(Path(name) / "trajectories.jsonl", [make_row("a")])
    obeyed("export", name, "--format=HERMES", "--output=1e5")
    assert prompts_in(Path("1e5")) == ["a"]


def test_export_of_a_large_file_takes_little_memory(run):
    row = orjson.dumps(make_row("x" * 20_000)) + b"\n"
    with (run / "trajectories.jsonl").open("wb") as file:
        for _ in range(2_000):
            file.write(row)
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from promptmill.__main__ import main\n"
        "peak_kb = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before_kb = peak_kb()\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit(code or peak_kb() - before_kb > 15_000)\n"  # of 40 MB read and 40 MB written
    )
    argv = [sys.executable, "-c", code, "export", str(run), "--format=hermes"]
    done = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2,000 rows in = 2,000 rows out" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_export_leaves_nothing_behind(run, number):
    os.mkfifo(run / "trajectories.jsonl")
    rows = 50 * (orjson.dumps(make_row("a")) + b"\n")
    argv = command("export", run, "--format=hermes", "--output=out.jsonl")
    with subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        with (run / "trajectories.jsonl").open("wb", buffering=0) as pipe, suppress(BrokenPipeError):
            pipe.write(rows * 100)  # more than a pipe holds: returns when the export is in the middle of reading
            process.send_signal(number)
            while True:  # rows without end, until the export has ended
                pipe.write(rows)
        assert process.communicate(timeout=30) == (b"", b"")
        assert process.returncode == 128 + number
    assert [path.name for path in Path().iterdir()] == ["data"]


# ── what is typed ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_lists_the_verbs(word, capsys):
    assert main([word]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: python -m promptmill VERB data/my_run")
    assert all(f"\n  {name} " in shown for name in VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_help_of_a_verb_lists_its_flags(name, capsys):
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: python -m promptmill {name} data/my_run")
    assert all(f"\n  --{flag.name}" in shown for flag in VERBS[name].flags)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "give a verb first"),
        (["--format=hermes"], "give a verb first"),
        (["exprot", "data/my_run"], "unknown verb 'exprot'; known: export, merge, stats; did you mean 'export'?"),
        (["\x1b[2J"], r"unknown verb '\x1b[2J'; known: export, merge, stats"),
        (["stats"], "give the run folder right after the verb: python -m promptmill stats data/my_run"),
        (["export", "--format=hermes"], "give the run folder right after the verb"),
        (["export", "data/my_run"], "--format is required; known: sharegpt, hermes"),
        (["export", "data/my_run", "--format"], "--format needs a value"),
        (["export", "data/my_run", "--format=herms"], "--format is 'herms'; known: sharegpt, hermes; did you mean"),
        (["export", "data/my_run", "--fromat=hermes"], "unknown flag --fromat; did you mean --format?"),
        (["stats", "data/my_run", "other"], "'other' is not a flag"),
        (["stats", "my_run"], "my_run does not exist; did you mean data/my_run?"),
        (["stats", "nowhere"], "nowhere does not exist; give the folder of a run, e.g. data/my_run"),
        (["stats", "data"], "data is no run folder: there is no run.json and no batch_<number>.jsonl in it"),
        (["stats", "data/my_run/failed.jsonl"], "is a file"),
    ],
)
def test_what_cannot_be_meant_is_refused(run, argv, complaint, capsys):
    before = content_of(run)
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert complaint in shown.err
    assert content_of(run) == before
