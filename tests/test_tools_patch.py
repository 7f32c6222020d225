"""patch: it changes what was meant and not one byte more, or nothing at all."""

import re
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toolbench import Bench
from toolsets.base import ToolError
from toolsets.edits import Lines, find_lines, replace_text, to_plain
from toolsets.tools.patch import unified_diff
from toolsets.v4a import apply_hunks, parse_patch

pytest_plugins = ["tests.toolbench_fixtures"]

TEXTS = st.text(alphabet='ab \t\n\r-–"“é', max_size=60)


def patched(text: str, body: str) -> str:
    """The text after an update by the given lines of a patch."""
    (operation,) = parse_patch(f"*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch")
    return apply_hunks(text, operation.hunks, "f")


# ── replace
# ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_replace_changes_the_one_place_and_shows_it(every_bench: Bench) -> None:
    await every_bench.put("run.py", b"a = 1\nb = 2\nc = 3\n")
    await every_bench.sh("chmod 755 run.py")
    answer = await every_bench.ok("patch", path="run.py", old_string="b = 2", new_string="b = 20")
    path = f"{every_bench.sandbox.cwd}/run.py"
    assert answer.content == {
        "success": True,
        "diff": f"--- {path}\n+++ {path}\n@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 20\n c = 3",
        "files_modified": [path],
        "lint": {"status": "ok"},
    }
    assert await every_bench.get("run.py") == b"a = 1\nb = 20\nc = 3\n"
    assert await every_bench.sh("stat -c %a run.py") == "755"


async def test_several_places_are_an_error_with_their_count_unless_all_are_meant(bench: Bench) -> None:
    await bench.put("f", b"x\ny\nx\n")
    answer = await bench.call("patch", path="f", old_string="x", new_string="z")
    assert answer.error.startswith("Found 2 matches for old_string, at lines 1, 3;")
    assert await bench.get("f") == b"x\ny\nx\n"
    answer = await bench.ok("patch", path="f", old_string="x", new_string="z", replace_all=True)
    assert answer["replacements"] == 2
    assert await bench.get("f") == b"z\ny\nz\n"


async def test_a_text_that_is_not_there_is_an_error_that_shows_the_nearest_lines(bench: Bench) -> None:
    await bench.put("f", b"def greet(name):\n    return name\n")
    answer = await bench.call("patch", path="f", old_string="def greet(nme):", new_string="x")
    assert "Could not find a match" in answer.error
    assert "line 1: 'def greet(name):'" in answer.error


async def test_undecodable_bytes_survive_a_change_elsewhere(bench: Bench) -> None:
    await bench.put("f", b"\xff\xfe x\nold\n")
    await bench.ok("patch", path="f", old_string="old", new_string="new é")
    assert await bench.get("f") == b"\xff\xfe x\nnew \xc3\xa9\n"


async def test_parameters_that_a_mode_needs_are_named(bench: Bench) -> None:
    assert "path, new_string" in (await bench.call("patch", old_string="x")).error
    assert "parameter patch" in (await bench.call("patch", mode="patch")).error
    await bench.put("f", b"x")
    assert "empty" in (await bench.call("patch", path="f", old_string="", new_string="x")).error
    assert "same" in (await bench.call("patch", path="f", old_string="x", new_string="x")).error
    assert "File not found" in (await bench.call("patch", path="g", old_string="x", new_string="y")).error


@pytest.mark.parametrize(
    ("text", "old", "new", "expected", "strategy"),
    [
        ("a\r\nb\r\nc\r\n", "a\nb", "a\nx\nb", "a\r\nx\r\nb\r\nc\r\n", "line endings"),
        ("a\r\nb\r\n", "b", "b\nc", "a\r\nb\r\nc\r\n", "exact"),
        ("say “hi” – ‘ok’\n", "say \"hi\" - 'ok'", "say \"ho\" - 'ok'", "say “ho” – ‘ok’\n", "characters"),
        ("a  \nb\t\nc\n", "a\nb\nc", "a\nB\nc", "a  \nB\nc\n", "trailing space"),
        (
            "    if x:\n        y\n    z\n",
            "if x:\n    y",
            "if x:\n    w",
            "    if x:\n        w\n    z\n",
            "indentation",
        ),
        ("\tif x:\n\t\ty\n", "if x:\n\ty", "if x:\n\tw\n\tv", "\tif x:\n\t\tw\n\t\tv\n", "indentation"),
        ("  a\n\n  b", "a\n\nb", "a\n\nc", "  a\n\n  c", "indentation"),
        ("a \nlast", "a\nlast", "a\nend", "a \nend", "trailing space"),
        ("a \nb\nc", "a\nb\n", "", "c", "trailing space"),
        ("x\nlast", "last", "", "x\n", "exact"),
    ],
)
def test_allowances_find_what_was_meant_and_keep_the_files_spelling(
    text: str, old: str, new: str, expected: str, strategy: str
) -> None:
    replaced = replace_text(text, old, new)
    assert (replaced.text, replaced.count, replaced.strategy) == (expected, 1, strategy)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("  a\n    b\n", "a\nb", "c"),  # not shifted alike
        ("    a\n", "\ta\n", "b\n"),  # the new line's indentation would be a guess
        ("a\n", "\n\n\n", "x"),
        ("a b\n", "ab", "x"),
        ("", "a", "b"),
    ],
)
def test_what_would_be_a_guess_is_refused(text: str, old: str, new: str) -> None:
    with pytest.raises(ToolError):
        replace_text(text, old, new)


@settings(deadline=None)
@given(before=TEXTS, old=TEXTS.filter(bool), new=TEXTS, after=TEXTS)
def test_an_exact_single_place_is_replaced_as_python_would(before: str, old: str, new: str, after: str) -> None:
    text = before + old + after
    if old == new or text.find(old, text.find(old) + len(old)) >= 0:
        return
    replaced = replace_text(text, old, new)
    assert replaced.strategy == "exact"
    if "\r\n" not in text:
        assert replaced.text == text.replace(old, new)


PERTURBATIONS = {
    "none": str,
    "lf": lambda text: text.replace("\r\n", "\n"),
    "plain": lambda text: to_plain(text).replace("\r\n", "\n"),
    "stripped ends": lambda text: "\n".join(line.rstrip() for line in text.split("\n")),
    "dedented": lambda text: textwrap.dedent(text.replace("\r\n", "\n")),
}


@settings(deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(["x = 1", "\tif “x”:", "    y – z", "    y", "", "  ", "end  "]), min_size=1, max_size=9
    ),
    ending=st.sampled_from(["\n", "\r\n"]),
    has_last_ending=st.booleans(),
    span=st.tuples(st.integers(0, 8), st.integers(1, 4)),
    perturb=st.sampled_from(sorted(PERTURBATIONS)),
)
def test_whatever_the_allowance_only_the_changed_line_changes(
    lines: list[str], ending: str, has_last_ending: bool, span: tuple[int, int], perturb: str
) -> None:
    lines[span[0] % len(lines)] = "  the only – one "
    text = ending.join(lines) + (ending if has_last_ending else "")
    first = max(0, span[0] % len(lines) - span[1] + 1)
    chosen = lines[first : first + span[1]]
    old = PERTURBATIONS[perturb](ending.join(chosen))
    at = next(i for i, line in enumerate(old.split("\n")) if "the only" in line)
    indent = re.match(r" *", old.split("\n")[at]).group()  # type: ignore[union-attr]
    new_lines = old.split("\n")
    new_lines[at] = f"{indent}changed" + ("\r" if new_lines[at].endswith("\r") else "")
    replaced = replace_text(text, old, "\n".join(new_lines))
    expected = list(lines)
    where = first + at
    expected[where] = "  changed"
    got = replaced.text.removesuffix(ending).split(ending) if has_last_ending else replaced.text.split(ending)
    # With less than the whole line quoted (its end stripped), what was not quoted stays.
    got[where] = got[where].rstrip()
    assert got == expected
    assert replaced.text.endswith(ending) == (has_last_ending or not expected[-1])


@settings(deadline=None)
@given(TEXTS)
def test_lines_and_their_endings_join_to_the_text_they_came_from(text: str) -> None:
    assert Lines.of(text).join() == text


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", ""]), max_size=12),
    st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3),
)
def test_lines_are_found_where_a_naive_search_finds_them(lines: list[str], wanted: list[str]) -> None:
    found = [match.start for match in find_lines(lines, wanted)]
    if not any(wanted):
        assert found == []
        return
    expected, start = [], 0
    while start + len(wanted) <= len(lines):
        if lines[start : start + len(wanted)] == wanted:
            expected.append(start)
            start += len(wanted)
        else:
            start += 1
    assert found == expected


# ── V4A
# ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_patch_adds_updates_moves_and_deletes(every_bench: Bench) -> None:
    await every_bench.put("app.py", b"def greet():\n    return 'hi'\n\n\ndef leave():\n    return 'bye'\n")
    await every_bench.put("old.txt", b"old\n")
    await every_bench.put("from.sh", b"echo 1\necho 2\n")
    await every_bench.put("same.sh", b"same\n")
    await every_bench.sh("chmod 755 from.sh same.sh")
    patch = """*** Begin Patch
*** Add File: new/notes.txt
+one
+
+two
*** Update File: app.py
@@ def leave():
-    return 'bye'
+    return 'see you'

*** Update File: from.sh
*** Move to: bin/to.sh
@@
 echo 1
-echo 2
+echo 3
*** Move File: same.sh -> bin/same.sh
*** Delete File: old.txt
*** End Patch"""
    answer = await every_bench.ok("patch", mode="patch", patch=patch)
    cwd = every_bench.sandbox.cwd
    assert answer["files_modified"] == [f"{cwd}/app.py"]
    assert answer["files_created"] == [f"{cwd}/new/notes.txt", f"{cwd}/bin/to.sh", f"{cwd}/bin/same.sh"]
    assert answer["files_deleted"] == [f"{cwd}/from.sh", f"{cwd}/same.sh", f"{cwd}/old.txt"]
    assert answer["lint"][f"{cwd}/app.py"] == {"status": "ok"}
    assert "-    return 'bye'\n+    return 'see you'" in answer["diff"]
    assert await every_bench.sh("find . -type f | sort") == "./app.py\n./bin/same.sh\n./bin/to.sh\n./new/notes.txt"
    assert await every_bench.get("new/notes.txt") == b"one\n\ntwo\n"
    assert await every_bench.sh("bin/to.sh; stat -c %a bin/same.sh") == "1\n3\n755"


async def test_a_file_may_be_moved_twice_and_its_old_name_used_again(bench: Bench) -> None:
    await bench.sh("echo 1 > a; chmod 755 a")
    patch = "*** Move File: a -> b\n*** Move File: b -> c/d\n*** Add File: a\n+new\n*** Update File: c/d\n-1\n+2"
    answer = await bench.ok("patch", mode="patch", patch=patch)
    assert await bench.sh("find . -type f | sort; stat -c %a c/d; cat a c/d") == "./a\n./c/d\n755\nnew\n2"
    assert [path.rpartition("/")[2] for path in answer["files_modified"]] == ["a"]
    assert [path.rpartition("/")[2] for path in answer["files_created"]] == ["d"]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("*** Update File: b\n-nowhere\n+x", "not in the file"),
        ("*** Update File: missing\n-b\n+x", "File not found"),
        ("*** Delete File: missing", "File not found"),
        ("*** Add File: b\n+x", "exists already"),
        ("*** Move File: b -> a", "exists already"),
        ("*** Update File: b\n", "changes nothing"),
        ("*** Add File: a/below\n+x", "a/below"),
        ("*** Delete File: a\n*** Update File: a\n-x\n+y", "removes it earlier"),
    ],
)
async def test_a_patch_of_which_one_part_fails_changes_no_file(bench: Bench, part: str, error: str) -> None:
    await bench.put("a", b"1\n")
    await bench.put("b", b"b\n")
    patch = f"*** Begin Patch\n*** Update File: a\n-1\n+2\n*** Add File: c\n+c\n{part}\n*** End Patch"
    answer = await bench.call("patch", mode="patch", patch=patch)
    assert error in answer.error
    assert await bench.sh("cat a b; ls") == "1\nb\na\nb"


async def test_a_write_that_fails_halfway_is_undone(every_bench: Bench) -> None:
    await every_bench.put("a", b"1\n")
    await every_bench.sh("touch blocked; chmod 755 a")
    patch = (
        "*** Begin Patch\n*** Update File: a\n*** Move to: moved\n-1\n+2\n*** Add File: new\n+x\n"
        "*** Add File: /proc/nothing\n+x\n*** End Patch"
    )
    answer = await every_bench.call("patch", mode="patch", patch=patch)
    assert "nothing was changed" in answer.error
    assert await every_bench.sh("cat a; ls; stat -c %a a") == "1\na\nblocked\n755"


@pytest.mark.parametrize(
    ("text", "body", "expected"),
    [
        ("a\nb\nc\n", " a\n-b\n+B\n c", "a\nB\nc\n"),
        ("a\nb\n", "@@ -1,2 +1,3 @@\n a\n+x\n b", "a\nx\nb\n"),
        ("a\n\nb\n", " a\n\n-b\n+c", "a\n\nc\n"),
        ("f()\nx\ng()\nx\n", "@@ g()\n-x\n+y", "f()\nx\ng()\ny\n"),
        ("g1()\nx\ng()\nx\n", "@@ g()\n-x\n+y", "g1()\nx\ng()\ny\n"),
        (
            "class A:\n def f\n  x\nclass B:\n def f\n  x\n",
            "@@ class B:\n@@ def f\n-  x\n+  y",
            "class A:\n def f\n  x\nclass B:\n def f\n  y\n",
        ),
        ("x\ny\nx\n", "-x\n+z\n*** End of File", "x\ny\nz\n"),
        ("a\nb", "+c", "a\nb\nc"),
        ("a\nb\n", "@@ a\n+c", "a\nc\nb\n"),
        ("", "+c", "c\n"),
        ("a\r\nb\r\n", " a\n+x\n-b\n+y", "a\r\nx\r\ny\r\n"),
        ("a  \nb\n", " a\n-b\n+c", "a  \nc\n"),
        ("    a\n    b\n", " a\n-b\n+c", "    a\n    c\n"),
        ("a\nb\nc\nd\n", "-a\n+A\n@@\n-d\n+D\n+E", "A\nb\nc\nD\nE\n"),
        ("a\nb\nc\nd\n", "-d\n+D\n@@\n-a\n+A", "A\nb\nc\nD\n"),
        ("a\nb", " a\n-b", "a\n"),
    ],
)
def test_hunks_apply_where_their_lines_are(text: str, body: str, expected: str) -> None:
    assert patched(text, body) == expected


@pytest.mark.parametrize(
    ("text", "body", "error"),
    [
        ("x\ny\nx\n", "-x\n+z", "fits 2 places, at lines 1, 3"),
        ("a\n", "@@ nowhere\n+z", "no line 'nowhere'"),
        ("a\n", "!z", "begins with a space"),
    ],
)
def test_a_hunk_that_could_be_meant_otherwise_is_refused(text: str, body: str, error: str) -> None:
    with pytest.raises(ToolError, match=error):
        patched(text, body)


@pytest.mark.parametrize(
    "patch", ["", "text", "*** Begin Patch\n*** End Patch", "*** Add File: a\nno plus", "*** Move File: a"]
)
def test_what_is_no_patch_is_refused(patch: str) -> None:
    with pytest.raises(ToolError):
        parse_patch(patch)


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_a_diff_is_bounded_to_what_differs_and_never_breaks(before: str, after: str) -> None:
    diff = unified_diff("f", before, after)
    assert diff.startswith("--- f\n+++ f")
    assert ("@@" in diff) == (before != after)


def test_a_diff_names_the_lines_of_the_whole_file() -> None:
    before = "".join(f"{i}\n" for i in range(100_000))
    diff = unified_diff("f", before, before.replace("\n90000\n", "\nx\n"))
    assert "@@ -89998,7 +89998,7 @@" in diff
