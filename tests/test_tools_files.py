"""read_file and write_file: what they say of a file is true, and bytes survive."""

import pytest

from tests.toolbench import Bench
from toolsets.lint import MAX_LINE_CHARS as LINT_LINE_CHARS
from toolsets.lint import lint

pytest_plugins = ["tests.toolbench_fixtures"]


@pytest.mark.parametrize(
    ("data", "content", "total_lines"),
    [
        (b"one\ntwo\n", "1|one\n2|two", 2),
        (b"one\ntwo", "1|one\n2|two", 2),
        (b"", "", 0),
        (b"\n", "1|", 1),
        (b"a\r\nb\r\n", "1|a\n2|b", 2),
        (b"a\x0cb\xe2\x80\xa8c\n", "1|a\x0cb\u2028c", 1),
        ("\ufeffbom é\n".encode(), "1|bom é", 1),
        (b"latin \xe9\n", "1|latin \ufffd", 1),
    ],
)
async def test_lines_are_numbered_and_no_line_is_made_up(
    bench: Bench, data: bytes, content: str, total_lines: int
) -> None:
    await bench.put("file", data)
    answer = await bench.ok("read_file", path="file")
    assert answer.content == {
        "content": content,
        "total_lines": total_lines,
        "file_size": len(data),
        "truncated": False,
    }


async def test_a_part_says_where_to_go_on(every_bench: Bench) -> None:
    await every_bench.put("file", b"".join(b"%d\n" % i for i in range(1, 1201)))
    part = await every_bench.ok("read_file", path="file", offset=501)
    assert part["content"].split("\n")[0] == "501|501"
    assert part["content"].split("\n")[-1] == "1000|1000"
    assert part["truncated"] is True
    assert part["next_offset"] == 1001
    assert part["hint"] == "Use offset=1001 to continue reading (showing 501-1000 of 1200 lines)"
    rest = await every_bench.ok("read_file", path="file", offset=1001)
    assert (rest["content"].split("\n")[-1], rest["truncated"]) == ("1200|1200", False)


async def test_an_offset_past_the_end_is_an_error_that_names_the_end(bench: Bench) -> None:
    await bench.put("file", b"1\n2\n")
    assert "has 2 lines" in (await bench.call("read_file", path="file", offset=3)).error


async def test_long_lines_and_long_answers_are_cut_and_say_so(bench: Bench) -> None:
    await bench.put("file", b'"' * 5_000 + b"\n" + b"\\\n" * 10 + (b'"' * 1_999 + b"\n") * 100)
    answer = await bench.ok("read_file", path="file")
    lines = answer["content"].split("\n")
    assert lines[0] == "1|" + '"' * 2_000 + "... [truncated]"
    assert len(answer.outcome.content) <= 100_000
    assert answer["truncated"] is True
    assert answer["next_offset"] == len(lines) + 1


async def test_a_file_too_large_to_be_read_whole_is_read_in_parts(every_bench: Bench) -> None:
    await every_bench.sh("seq 1 1000000 > 'big file'; printf 'no end' >> 'big file'")
    part = await every_bench.ok("read_file", path="big file", offset=999_999, limit=10)
    assert part["content"] == "999999|999999\n1000000|1000000\n1000001|no end"
    assert part["total_lines"] == 1_000_001
    assert part["file_size"] == 6_888_896 + 6
    assert part["truncated"] is False
    assert "has 1000001 lines" in (await every_bench.call("read_file", path="big file", offset=2_000_000)).error


async def test_what_is_no_readable_text_is_refused_for_what_it_is(every_bench: Bench) -> None:
    await every_bench.put("binary", b"ELF\0\1")
    await every_bench.sh("mkdir folder; mkfifo pipe")
    assert "binary" in (await every_bench.call("read_file", path="binary")).error
    assert "is a directory" in (await every_bench.call("read_file", path="folder")).error
    assert (await every_bench.call("read_file", path="pipe")).outcome.kind == "tool_error"
    assert "NUL" in (await every_bench.call("read_file", path="a\0b")).error
    assert (await every_bench.call("read_file", path="")).outcome.failed


async def test_a_missing_file_is_told_with_the_nearest_names(bench: Bench) -> None:
    await bench.sh("mkdir -p src/deep .git; touch src/main.py src/main_test.py 'src/odd[1].py' src/deep/other.py")
    wrong_ending = await bench.call("read_file", path="src/main.txt")
    assert wrong_ending.error == "File not found: src/main.txt"
    assert sorted(wrong_ending["similar_files"]) == [
        f"{bench.sandbox.cwd}/src/main.py",
        f"{bench.sandbox.cwd}/src/main_test.py",
    ]
    wrong_folder = await bench.call("read_file", path="nowhere/other.py")
    assert wrong_folder["similar_files"] == [f"{bench.sandbox.cwd}/src/deep/other.py"]
    odd = await bench.call("read_file", path="src/odd[1].txt")
    assert odd["similar_files"] == [f"{bench.sandbox.cwd}/src/odd[1].py"]
    assert "similar_files" not in (await bench.call("read_file", path="src/zzz")).content


async def test_relative_paths_are_taken_from_the_terminals_folder(every_bench: Bench) -> None:
    await every_bench.sh("mkdir -p 'a b'; cd 'a b'")
    await every_bench.ok("write_file", path="./x/../file", content="here\n")
    assert await every_bench.sh("cat file; cd ..; export X=1") == "here"
    assert (await every_bench.ok("read_file", path="a b/file"))["content"] == "1|here"
    await every_bench.ok("write_file", path="~/note", content="home\n")
    assert await every_bench.sh('cat "$HOME/note"') == "home"


async def test_writing_says_truly_whether_folders_were_made(every_bench: Bench) -> None:
    made = await every_bench.ok("write_file", path="new/deep/file.txt", content="é")
    assert (made["bytes_written"], made["dirs_created"]) == (2, True)
    assert made["files_modified"] == [f"{every_bench.sandbox.cwd}/new/deep/file.txt"]
    again = await every_bench.ok("write_file", path="new/deep/file.txt", content="")
    assert (again["bytes_written"], again["dirs_created"]) == (0, False)
    assert await every_bench.get("new/deep/file.txt") == b""


async def test_writing_keeps_the_mode_and_follows_a_link(bench: Bench) -> None:
    await bench.sh("printf x > run.sh; chmod 755 run.sh; ln -s run.sh link")
    await bench.ok("write_file", path="link", content="echo y\n")
    assert await bench.sh("./run.sh; test -L link && echo link") == "y\nlink"


@pytest.mark.parametrize("path", ["folder", "folder/", "file/below", "/proc/nothing/here"])
async def test_a_path_that_cannot_be_written_is_an_error(bench: Bench, path: str) -> None:
    await bench.sh("mkdir folder; touch file")
    answer = await bench.call("write_file", path=path, content="x")
    assert answer.outcome.kind == "tool_error"
    assert path in answer.error


@pytest.mark.parametrize(
    ("path", "text", "status"),
    [
        ("a.py", "x = 1\n", "ok"),
        ("a.py", "x = \n", "error"),
        ("a.py", "'\\d'\n", "ok"),
        ("a.py", "x\0", "error"),
        ("a.py", "(" * 1_000, "error"),
        ("a.py", "-" * 4_000 + "1", "error"),
        ("a.py", "import a" + ".a" * LINT_LINE_CHARS, "skipped"),
        ("A.JSON", "{}", "ok"),
        ("a.json", "{,}", "error"),
        ("a.json", "[" * 4_000, "error"),
        ("a.toml", "a = 1", "ok"),
        ("a.toml", "a = ", "error"),
        ("a.txt", "x = ", "skipped"),
        ("folder.py/README", "x = ", "skipped"),
        ("Makefile", "", "skipped"),
    ],
)
def test_syntax_is_checked_by_the_name_of_the_file(path: str, text: str, status: str) -> None:
    assert lint(path, text)["status"] == status


async def test_a_syntax_error_is_part_of_the_answer_and_no_failure(bench: Bench) -> None:
    answer = await bench.ok("write_file", path="a.py", content="def f(:\n    pass\n")
    assert answer["lint"]["status"] == "error"
    assert answer["lint"]["output"].startswith("line 1: ")


async def test_lone_surrogates_in_arguments_do_no_harm(bench: Bench) -> None:
    await bench.ok("write_file", path="file", content="a\ud800b")
    assert await bench.get("file") == "a\ufffdb".encode()
