"""Files: read a part of one, write one whole."""

import shlex
from collections.abc import Mapping
from typing import Any

from toolsets.base import MAX_RESULT_CHARS, Tool, ToolContext, ToolError, ToolResult
from toolsets.lint import lint
from toolsets.shell import resolve_path
from toolsets.text import cut_end, encoded_chars, shortened
from toolsets.textfile import MAX_BYTES, encode_text, explain_os_error, read_bytes, refuse_binary

MAX_LINES = 2_000
DEFAULT_LINES = 500
MAX_LINE_CHARS = 2_000
MAX_CONTENT_CHARS = MAX_RESULT_CHARS - 5_000
"""Room for the content of one answer, escapes of JSON included; the rest is for the other keys."""
MAX_PART_BYTES = 2_000_000
LARGE_FILE_TIMEOUT_S = 60
PATH_PARAMETER = {"type": "string", "description": "Path of the file, absolute or from the current folder."}


async def read_file(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Answer one `read_file` call."""
    shown_path, offset, limit = arguments["path"], arguments["offset"], arguments["limit"]
    path = await resolve_path(context, shown_path)
    data = await read_bytes(context, path, shown_path=shown_path, max_bytes=MAX_BYTES + 1)
    refuse_binary(data, shown_path)
    if len(data) > MAX_BYTES:
        lines, total_lines, size_bytes = await _read_part(context, path, offset, limit)
    else:
        every_line = split_lines(data)
        lines, total_lines, size_bytes = (
            every_line[offset - 1 : offset - 1 + limit],
            len(every_line),
            len(data),
        )
    if offset > max(total_lines, 1):
        raise ToolError(f"offset {offset} is past the end of {shown_path}, which has {total_lines} lines")
    content = _number(lines, offset)
    last = offset + len(content) - 1
    answer: dict[str, Any] = {
        "content": "\n".join(content),
        "total_lines": total_lines,
        "file_size": size_bytes,
        "truncated": last < total_lines,
    }
    if last < total_lines:
        answer["next_offset"] = last + 1
        answer["hint"] = f"Use offset={last + 1} to continue reading (showing {offset}-{last} of {total_lines} lines)"
    return ToolResult(answer)


async def write_file(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Answer one `write_file` call."""
    shown_path, text = arguments["path"], arguments["content"]
    path = await resolve_path(context, shown_path)
    if shown_path.endswith("/"):
        raise ToolError(f"{shown_path} names a directory; give the path of a file")
    makes_folder = not await _is_folder(context, path.rpartition("/")[0] or "/")
    data = encode_text(text)
    try:
        await context.sandbox.write_file(path, data)
    except OSError as exc:
        raise ToolError(explain_os_error(exc, shown_path)) from exc
    return ToolResult(
        {
            "bytes_written": len(data),
            "dirs_created": makes_folder,
            "lint": lint(path, text),
            "files_modified": [path],
        }
    )


def split_lines(data: bytes) -> list[str]:
    """The lines of a text without their ends; after the last line break a line follows only if not empty."""
    lines = data.decode(errors="replace").removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _number(lines: list[str], first: int) -> list[str]:
    """Write the number before each line, as many lines as one answer has room for, one at least."""
    numbered: list[str] = []
    room = MAX_CONTENT_CHARS
    for number, line in enumerate(lines, first):
        text = f"{number}|{cut_end(line, MAX_LINE_CHARS)}"
        room -= encoded_chars(text) + 2
        if room < 0 and numbered:
            break
        numbered.append(text)
    return numbered


async def _read_part(context: ToolContext, path: str, offset: int, limit: int) -> tuple[list[str], int, int]:
    """Some lines of a file too large to be read whole, how many it has in all, and its size in bytes."""
    quoted = shlex.quote(path)
    last = offset + limit - 1
    script = (
        f"wc -lc <{quoted}; tail -c 1 <{quoted} | wc -l; "
        f"sed -n '{offset},{last}p;{last}q' <{quoted} | head -c {MAX_PART_BYTES}"
    )
    result = await context.sandbox.exec(
        script, timeout_s=LARGE_FILE_TIMEOUT_S, max_output_bytes=MAX_PART_BYTES + 10_000
    )
    counts, _, rest = result.output.partition(b"\n")
    ends_in_newline, _, part = rest.partition(b"\n")
    try:
        breaks, size_bytes = map(int, counts.split())
        total_lines = breaks + (1 - int(ends_in_newline))
    except ValueError as exc:
        raise ToolError(f"cannot read {path}: {shortened(result.output.decode(errors='replace'), 500)}") from exc
    return split_lines(part), total_lines, size_bytes


async def _is_folder(context: ToolContext, path: str) -> bool:
    try:
        await context.sandbox.read_file(path, max_bytes=1)
    except IsADirectoryError:
        return True
    except OSError:
        return False
    return False


READ_FILE = Tool(
    name="read_file",
    description=(
        "Read a text file, or a part of it. Each line comes as NUMBER|TEXT; the number and bar are not part "
        f"of the file. Lines over {MAX_LINE_CHARS} characters are cut."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": PATH_PARAMETER,
            "offset": {
                "type": "integer",
                "minimum": 1,
                "default": 1,
                "description": "First line to read, from 1. Default 1.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_LINES,
                "default": DEFAULT_LINES,
                "description": f"How many lines to read. Default {DEFAULT_LINES}, at most {MAX_LINES}.",
            },
        },
        "required": ["path"],
        "additionalProperties": False,
    },
    run=read_file,
)

WRITE_FILE = Tool(
    name="write_file",
    description=(
        "Write a file whole, replacing what it held; makes missing parent folders. The syntax of .py, .json "
        "and .toml files is checked. To change a part of a file use patch."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": PATH_PARAMETER,
            "content": {"type": "string", "description": "The whole new text of the file."},
        },
        "required": ["path", "content"],
        "additionalProperties": False,
    },
    run=write_file,
)
