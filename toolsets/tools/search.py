"""Search: for text in files, or for files by name.

One `find` lists the files and one `grep` looks into them, whatever else a sandbox has: a search then means
the same on every machine and in the smallest container. `rg`, where there is one, would leave other files
out, read another dialect of regular expressions, and not be faster (1.1 s for grep, 1.6 s for rg, over a
gigabyte of packages).
"""

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from toolsets.base import MAX_RESULT_CHARS, Tool, ToolContext, ToolError, ToolResult
from toolsets.sandboxes.base import ExecResult
from toolsets.shell import resolve_path
from toolsets.text import cut_end, shortened

SEARCH_TIMEOUT_S = 60
DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
MAX_CONTEXT = 20
MAX_LINE_CHARS = 500
MAX_LINE_BYTES = 4_000
"""Of a line that comes out of the sandbox, the path included."""
MAX_LISTED_BYTES = 1_500_000
"""Of all that was found; what comes after is counted, not listed."""
MAX_ANSWER_CHARS = MAX_RESULT_CHARS - 5_000
SKIPPED_FOLDERS = ("node_modules", "__pycache__")

_BAD_PATTERN, _NO_PATH = 2, 3
_FOUND = "printf '\\n\\1'; wc -l"
"""After the listed part: the number of lines that were not listed."""

# The first dialect that understands the pattern is used; `e` keeps what the last one said. `-Z` ends a path
# by NUL; where grep lacks it (busybox), by a colon.
_CHOOSE_DIALECT = """
p={pattern}
fits() {{ e=$(grep "$1" -e "$p" /dev/null 2>&1); [ $? -le 1 ]; }}
if fits -ZIP; then set -- -ZIP; elif fits -ZIE; then set -- -ZIE; elif fits -IE; then set -- -IE
else printf '%s' "$e"; exit 2; fi
"""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a search script printed."""

    is_folder: bool
    """Whether a folder was searched, not a single file."""
    lines: list[bytes]
    total: int
    """How many there are in all; more than `lines` when they were too many to be listed."""


async def search_files(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Answer one `search_files` call."""
    shown_path = arguments["path"]
    is_for_files = arguments["target"] == "files"
    script = search_script(await resolve_path(context, shown_path), arguments)
    result = await context.sandbox.exec(script, timeout_s=SEARCH_TIMEOUT_S, max_output_bytes=MAX_LISTED_BYTES + 100_000)
    if result.timed_out:
        error = f"the search took longer than {SEARCH_TIMEOUT_S}s; search a smaller folder"
        return ToolResult({"error": error}, failed=True, timed_out=True)
    _check(result, shown_path, arguments["pattern"])
    listing = _parse_listing(result.output)
    first = arguments["offset"]
    page = listing.lines[first : first + arguments["limit"]]
    name_of = _naming(shown_path, listing.is_folder)
    mode = "files_only" if is_for_files else arguments["output_mode"]
    if mode == "files_only":
        return _answer("files", [name_of(line.decode(errors="surrogateescape")) for line in page], listing, first)
    if mode == "count":
        counts = [[name_of(path), int(count)] for path, count in map(_split_count, page)]
        return _answer("counts", counts, listing, first)
    found = [_split_match(line) for line in page]
    matches = [
        {"path": name_of(path), "line": number, "content": cut_end(text, MAX_LINE_CHARS)}
        for path, number, text in found
    ]
    if arguments["context"] and found:
        await _add_context(context, arguments, found, matches)
    return _answer("matches", matches, listing, first)


def search_script(path: str, arguments: Mapping[str, Any]) -> str:
    """The bash script of one search.

    It prints what was searched (a dot for a folder), one line per match, file or count, and then `_FOUND`.
    """
    enter = (
        f"path={shlex.quote(path)}\n"
        'if [ -d "$path" ]; then cd -- "$path" && only=.; '
        'elif [ -e "$path" ]; then cd -- "${path%/*}/" && only="./${path##*/}"; '
        f"else exit {_NO_PATH}; fi || exit {_NO_PATH}\n"
        'echo "$only"\n'
        "export LC_ALL=C\n"
    )
    globs = arguments.get("file_glob", "") if arguments["target"] == "content" else _name_glob(arguments["pattern"])
    skipped = " -o ".join(f"-name {shlex.quote(name)}" for name in (".?*", *SKIPPED_FOLDERS))
    listed = (
        f'if [ "$only" = . ]; then find . \\( {skipped} \\) -prune -o -type f {find_test(globs)} -print0; '
        "else printf '%s\\0' \"$only\"; fi 2>/dev/null | sort -z"
    )
    end = f"cut -b1-{MAX_LINE_BYTES} | {{ head -c {MAX_LISTED_BYTES}; {_FOUND}; }}"
    if arguments["target"] == "files":
        return f"{enter}{{ {listed}; }} | tr '\\0' '\\n' | {end}"
    match = 'xargs -0 grep "$1" {options} -e "$p" -- 2>/dev/null'
    names = match.format(options="-l") + " | tr '\\0' '\\n'"
    steps = {
        "content": match.format(options="-nH"),
        "files_only": names,
        "count": f"{names} | tr '\\n' '\\0' | {match.format(options='-cH')}",
    }[arguments["output_mode"]]
    choose = _CHOOSE_DIALECT.format(pattern=shlex.quote(arguments["pattern"]))
    return f"{enter}{choose}{{ {listed}; }} | {steps} | {end}"


def find_test(globs: str) -> str:
    """The tests of `find` for a glob; braces are alternatives, and a glob with a slash is about the whole path."""
    if not globs:
        return ""
    tests = []
    for glob in expand_braces(globs):
        name = glob.removeprefix("**/").removeprefix("./")
        if "/" in name:
            tests.append(f"-path {shlex.quote('./' + name.lstrip('/').replace('**/', '*').replace('**', '*'))}")
        else:
            tests.append(f"-name {shlex.quote(name)}")
    return "\\( " + " -o ".join(tests) + " \\)"


def expand_braces(glob: str, max_count: int = 50) -> list[str]:
    """Write `*.{a,b}` as `*.a` and `*.b`; beyond `max_count` alternatives the rest is left out."""
    pending, expanded = [glob], list[str]()
    while pending and len(expanded) + len(pending) <= max_count:
        text = pending.pop(0)
        braces = re.search(r"\{([^{},]*+,[^{}]*+)\}", text)
        if braces is None:
            expanded.append(text)
        else:
            parts = braces[1].split(",", max_count)
            pending += [text[: braces.start()] + part + text[braces.end() :] for part in parts]
    return expanded or [glob]


def _name_glob(pattern: str) -> str:
    return pattern if any(char in pattern for char in "*?[{") else f"*{pattern}*"


def _check(result: ExecResult, shown_path: str, pattern: str) -> None:
    if result.returncode == _NO_PATH:
        raise ToolError(f"no file or folder {shown_path!r}")
    if result.returncode == _BAD_PATTERN:
        reason = shortened(result.output.decode(errors="replace").strip(), 1_000)
        raise ToolError(f"the pattern {shortened(pattern, 200)!r} is not a regular expression: {reason}")


def _parse_listing(output: bytes) -> Listing:
    listed, _, unlisted = output.rpartition(b"\n\1")
    searched, _, listed = listed.partition(b"\n")
    lines = [line for line in listed.split(b"\n") if line]
    rest = int(unlisted) if unlisted.strip().isdigit() else 0
    if rest:
        lines.pop()  # cut in the middle, and counted among the rest
    return Listing(searched == b".", lines, len(lines) + rest)


def _split_path(line: bytes) -> tuple[str, str]:
    """Part the path from what grep says of it."""
    separator = b"\0" if b"\0" in line else b":"
    path, _, rest = line.partition(separator)
    return path.decode(errors="surrogateescape"), rest.decode(errors="replace")


def _split_match(line: bytes) -> tuple[str, int, str]:
    path, rest = _split_path(line)
    number, _, text = rest.partition(":")
    return path, int(number) if number.isdecimal() else 0, text.removesuffix("\r")


def _split_count(line: bytes) -> tuple[str, str]:
    path, count = _split_path(line)
    return path, count if count.isdecimal() else "0"


def _naming(shown_path: str, is_folder: bool) -> Callable[[str], str]:
    """How to name what was found: by the path the model gave, so that it can be used again."""
    prefix = "" if shown_path in (".", "./") else shown_path.rstrip("/") + "/"
    return lambda path: prefix + path.removeprefix("./") if is_folder else shown_path


def _answer(key: str, entries: Sequence[Any], listing: Listing, first: int) -> ToolResult:
    """The result of a search, with as many entries as one answer has room for."""
    sizes = itertools.accumulate(len(orjson.dumps(str(entry))) for entry in entries)
    kept = list(itertools.takewhile(lambda pair: pair[1] <= MAX_ANSWER_CHARS, zip(entries, sizes, strict=True)))
    shown = [entry for entry, _ in kept]
    content: dict[str, Any] = {"total_count": listing.total, key: dict(shown) if key == "counts" else shown}
    after = first + len(shown)
    if after < listing.total:
        content["truncated"] = True
        content["limit_reason"] = (
            f"use offset={after} for more"
            if after < len(listing.lines)
            else "too many to list them all; narrow the search"
        )
    return ToolResult(content)


async def _add_context(
    context: ToolContext,
    arguments: Mapping[str, Any],
    found: Sequence[tuple[str, int, str]],
    matches: Sequence[dict[str, Any]],
) -> None:
    """Give each match the lines before and after it, read by one more script."""
    path = await resolve_path(context, arguments["path"])
    around = arguments["context"]
    numbers_by_path: dict[str, list[int]] = {}
    for name, number, _ in found:
        numbers_by_path.setdefault(name, []).append(number)
    steps = [f'path={shlex.quote(path)}; if [ -d "$path" ]; then cd -- "$path"; else cd -- "${{path%/*}}/"; fi || exit']
    for name, numbers in numbers_by_path.items():
        ranges = "".join(f"{first},{last}{{=;p;}};" for first, last in merge_ranges(numbers, around))
        steps.append(
            f"echo F; sed -n {shlex.quote(ranges)} {shlex.quote(name)} 2>/dev/null | cut -b1-{MAX_LINE_BYTES}; echo"
        )
    result = await context.sandbox.exec("\n".join(steps), timeout_s=SEARCH_TIMEOUT_S, max_output_bytes=4_000_000)
    text_by_place = _parse_context(result.output, list(numbers_by_path))
    for match, (name, number, _) in zip(matches, found, strict=True):
        for key, span in (
            ("before", range(number - around, number)),
            ("after", range(number + 1, number + around + 1)),
        ):
            match[key] = [text_by_place[name, i] for i in span if (name, i) in text_by_place]


def merge_ranges(numbers: Iterable[int], around: int) -> list[tuple[int, int]]:
    """Line ranges that cover each number and `around` lines on both sides, without overlap."""
    merged: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first, last = max(1, number - around), number + around
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def _parse_context(output: bytes, names: Sequence[str]) -> dict[tuple[str, int], str]:
    """Line texts by (path, number). Numbers and texts alternate, so no text can be taken for a number."""
    texts: dict[tuple[str, int], str] = {}
    remaining = iter(names)
    name = ""
    lines = iter(output.decode(errors="replace").split("\n"))
    for line in lines:
        if line == "F":
            name = next(remaining, "")
        elif line.isdecimal():
            texts[name, int(line)] = cut_end(next(lines, "").removesuffix("\r"), MAX_LINE_CHARS)
    return texts


SEARCH_FILES = Tool(
    name="search_files",
    description=(
        "Search text in files (target=content, pattern is a regular expression) or find files by name "
        "(target=files, pattern is a glob). Results are sorted by path. Binary files, hidden files and folders, "
        "node_modules and __pycache__ are left out."
    ),
    parameters={
        "type": "object",
        "properties": {
            "pattern": {
                "type": "string",
                "minLength": 1,
                "description": "Regular expression for content; glob such as *.py, or part of a name, for files.",
            },
            "target": {
                "type": "string",
                "enum": ["content", "files"],
                "default": "content",
                "description": "What to search. Default content.",
            },
            "path": {
                "type": "string",
                "default": ".",
                "description": "Folder or file to search. Default: the current folder.",
            },
            "file_glob": {
                "type": "string",
                "description": "Search content only in files like this, such as *.py or src/**/*.{ts,tsx}.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LIMIT,
                "default": DEFAULT_LIMIT,
                "description": f"How many results. Default {DEFAULT_LIMIT}, at most {MAX_LIMIT}.",
            },
            "offset": {
                "type": "integer",
                "minimum": 0,
                "default": 0,
                "description": "How many results to leave out first. Default 0.",
            },
            "output_mode": {
                "type": "string",
                "enum": ["content", "files_only", "count"],
                "default": "content",
                "description": "For content: the lines, only the files, or matching lines per file. Default content.",
            },
            "context": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_CONTEXT,
                "default": 0,
                "description": f"Lines to show before and after each. Default 0, at most {MAX_CONTEXT}.",
            },
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
    run=search_files,
)
