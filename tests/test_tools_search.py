"""search_files: the same answer from every sandbox, and nothing but data in patterns and names."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.toolbench import Bench
from toolsets.arguments import check_arguments
from toolsets.tools.search import SEARCH_FILES, _parse_listing, expand_braces, merge_ranges, search_script

pytest_plugins = ["tests.toolbench_fixtures"]

TREE = {
    "a.py": b"import os\nprint('needle')\n# end\n",
    "b.txt": b"needle one\nnothing\nneedle two",
    "src/deep/c.py": b"x = 'Needle'\r\nneedle = 1\r\n",
    "src/d.ts": b"needle\n",
    "src/e.tsx": b"needle\n",
    "odd:name 1:2.txt": b"needle: 7:\n",
    "binary": b"needle\0\n",
    ".hidden": b"needle\n",
    ".git/config": b"needle\n",
    "node_modules/x.py": b"needle\n",
}


async def plant(bench: Bench) -> None:
    for path, data in TREE.items():
        await bench.put(path, data)


async def test_content_is_found_with_path_line_and_text_sorted_by_path(every_bench: Bench) -> None:
    await plant(every_bench)
    answer = await every_bench.ok("search_files", pattern="needle")
    assert answer.content == {
        "total_count": 7,
        "matches": [
            {"path": "a.py", "line": 2, "content": "print('needle')"},
            {"path": "b.txt", "line": 1, "content": "needle one"},
            {"path": "b.txt", "line": 3, "content": "needle two"},
            {"path": "odd:name 1:2.txt", "line": 1, "content": "needle: 7:"},
            {"path": "src/d.ts", "line": 1, "content": "needle"},
            {"path": "src/deep/c.py", "line": 2, "content": "needle = 1"},
            {"path": "src/e.tsx", "line": 1, "content": "needle"},
        ],
    }


async def test_pages_add_up_to_the_whole(bench: Bench) -> None:
    await plant(bench)
    first = await bench.ok("search_files", pattern="needle", limit=3)
    assert (first["total_count"], first["truncated"], first["limit_reason"]) == (7, True, "use offset=3 for more")
    rest = await bench.ok("search_files", pattern="needle", offset=3)
    assert len(first["matches"] + rest["matches"]) == 7
    assert "truncated" not in rest.content
    beyond = await bench.ok("search_files", pattern="needle", offset=10)
    assert beyond.content == {"total_count": 7, "matches": []}


async def test_files_only_and_count_answer_per_file(every_bench: Bench) -> None:
    await plant(every_bench)
    files = await every_bench.ok("search_files", pattern="needle", output_mode="files_only", file_glob="*.{py,txt}")
    assert files.content == {"total_count": 4, "files": ["a.py", "b.txt", "odd:name 1:2.txt", "src/deep/c.py"]}
    counts = await every_bench.ok("search_files", pattern="needle", output_mode="count", file_glob="*.txt")
    assert counts.content == {"total_count": 2, "counts": {"b.txt": 2, "odd:name 1:2.txt": 1}}


async def test_context_gives_the_lines_around_each_match(every_bench: Bench) -> None:
    await plant(every_bench)
    answer = await every_bench.ok("search_files", pattern="needle", context=1, file_glob="*.py")
    assert answer["matches"] == [
        {"path": "a.py", "line": 2, "content": "print('needle')", "before": ["import os"], "after": ["# end"]},
        {"path": "src/deep/c.py", "line": 2, "content": "needle = 1", "before": ["x = 'Needle'"], "after": []},
    ]
    one_file = await every_bench.ok("search_files", pattern="two", context=2, path="b.txt")
    assert one_file["matches"][0]["before"] == ["needle one", "nothing"]


async def test_context_lines_that_look_like_line_numbers_are_not_taken_for_them(bench: Bench) -> None:
    await bench.put("f", b"1\nF\n3\nneedle\n5\n\n7\n")
    answer = await bench.ok("search_files", pattern="needle", context=3)
    assert answer["matches"][0]["before"] == ["1", "F", "3"]
    assert answer["matches"][0]["after"] == ["5", "", "7"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["a.py", "src/deep/c.py"]),
        ("**/*.py", ["a.py", "src/deep/c.py"]),
        ("src/**/*.{ts,tsx,py}", ["src/d.ts", "src/deep/c.py", "src/e.tsx"]),
        ("odd", ["odd:name 1:2.txt"]),
        ("?.ts", ["src/d.ts"]),
        ("nothing like it", []),
    ],
)
async def test_files_are_found_by_glob_or_part_of_a_name(bench: Bench, pattern: str, expected: list[str]) -> None:
    await plant(bench)
    answer = await bench.ok("search_files", pattern=pattern, target="files")
    assert answer.content == {"total_count": len(expected), "files": expected}


async def test_a_hidden_place_is_searched_when_it_is_named(bench: Bench) -> None:
    await plant(bench)
    folder = await bench.ok("search_files", pattern="needle", path=".git")
    assert [match["path"] for match in folder["matches"]] == [".git/config"]
    file = await bench.ok("search_files", pattern="needle", path=".hidden")
    assert file["total_count"] == 1
    await bench.sh("cd src")
    above = await bench.ok("search_files", pattern="one", path="../b.txt")
    assert above["matches"][0]["line"] == 1


async def test_the_path_of_a_single_file_is_the_file(bench: Bench) -> None:
    await plant(bench)
    for path in ("b.txt", f"{bench.sandbox.cwd}/b.txt"):
        answer = await bench.ok("search_files", pattern="one", path=path)
        assert [match["path"] for match in answer["matches"]] == [path]


async def test_patterns_are_data_and_never_commands_or_options(every_bench: Bench) -> None:
    await every_bench.put("f", b"$(touch hacked) -v 'x' \"y\"\n")
    for pattern in (r"\$\(touch hacked\)", "-v", "'x'", '"y"'):
        assert (await every_bench.ok("search_files", pattern=pattern))["total_count"] == 1
    await every_bench.ok("search_files", pattern="$(touch hacked)", target="files")
    await every_bench.ok("search_files", pattern="x", file_glob="$(touch hacked)' -o -name '*")
    assert await every_bench.sh("ls") == "f"


async def test_what_cannot_be_searched_is_an_error(every_bench: Bench) -> None:
    assert "not a regular expression" in (await every_bench.call("search_files", pattern="(")).error
    assert "no file or folder 'nowhere'" in (await every_bench.call("search_files", pattern="x", path="nowhere")).error
    assert (await every_bench.call("search_files", pattern="")).outcome.kind == "invalid_arguments"


async def test_many_and_long_matches_are_counted_exactly_and_listed_within_bounds(bench: Bench) -> None:
    await bench.sh("yes 'a needle in a long line of hay, so long that it fills the page' | head -n 60000 > hay")
    await bench.sh("head -c 3000000 /dev/zero | tr '\\0' n > long")
    answer = await bench.ok("search_files", pattern="needle|nnn", limit=1000)
    assert answer["total_count"] == 60_001
    assert answer["truncated"] is True
    assert len(answer.outcome.content) <= 100_000
    last = await bench.ok("search_files", pattern="nnn", path="long")
    assert last["matches"][0]["content"] == "n" * 500 + "... [truncated]"
    beyond = await bench.ok("search_files", pattern="needle", offset=50_000)
    assert "narrow the search" in beyond["limit_reason"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"pattern": r"need\w+ (one|two)$"},
        {"pattern": "needle", "output_mode": "files_only"},
        {"pattern": "needle", "output_mode": "count"},
        {"pattern": "needle", "output_mode": "count", "file_glob": "*.{ts,tsx}"},
        {"pattern": "src/*", "target": "files"},
    ],
)
def test_busybox_gives_the_same_listing(arguments: dict[str, Any], tmp_path: Path) -> None:
    busybox, bash = shutil.which("busybox"), shutil.which("bash")
    if busybox is None or bash is None:
        pytest.skip("no busybox on this machine")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("find", "sort", "xargs", "cut", "head", "wc", "tr", "grep"):
        (programs / name).symlink_to(busybox)
    for path, data in TREE.items():
        # The grep of busybox ends a path by a colon, and looks into binary files.
        if ":" not in path and path != "binary":
            (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / path).write_bytes(data)
    script = search_script(str(tmp_path / "tree"), check_arguments(arguments, SEARCH_FILES.parameters))
    listings = [
        _parse_listing(subprocess.run([bash, "-c", script], env={"PATH": path}, capture_output=True, check=True).stdout)
        for path in (str(programs), os.defpath)
    ]
    assert listings[0].total == listings[1].total > 0
    normal = [[line.replace(b"\0", b":") for line in listing.lines] for listing in listings]
    assert normal[0] == normal[1]


def test_braces_are_alternatives() -> None:
    assert expand_braces("*.py") == ["*.py"]
    assert expand_braces("{a,b}/*.{c,d}") == ["a/*.c", "a/*.d", "b/*.c", "b/*.d"]
    assert len(expand_braces("{a,b}" * 20)) <= 50


def test_ranges_around_numbers_are_merged() -> None:
    assert merge_ranges([1, 3, 10], 1) == [(1, 4), (9, 11)]
    assert merge_ranges([5, 5], 0) == [(5, 5)]
