"""The terminal: run a shell command to its end, or start one in the background."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from toolsets.base import Tool, ToolContext, ToolError, ToolResult
from toolsets.sandboxes.base import ExecResult
from toolsets.shell import Shell, open_shell
from toolsets.text import cut_middle, strip_escapes
from toolsets.tools.process import start_background

DEFAULT_TIMEOUT_S = 180
MAX_TIMEOUT_S = 600
MAX_OUTPUT_CHARS = 50_000
MAX_OUTPUT_BYTES = 500_000
"""More than `MAX_OUTPUT_CHARS` can take in UTF-8, at either end, with escape sequences to remove."""

_FALSE = "Condition is false (not an error)"
_NO_MATCH = "No matches found (not an error)"
_DIFFER = "Files differ (not an error)"
MEANING_OF_EXIT_1 = {
    **dict.fromkeys(("grep", "egrep", "fgrep", "zgrep", "rg", "ag", "pgrep", "git grep"), _NO_MATCH),
    **dict.fromkeys(("diff", "cmp", "git diff"), _DIFFER),
    **dict.fromkeys(("test", "[", "[["), _FALSE),
}
"""Programs whose exit status 1 is an answer, not a failure."""

_SEPARATOR = re.compile(r"[;&|\n()]+")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)


async def run_terminal(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Run the command of one `terminal` call."""
    command, workdir = arguments["command"], arguments.get("workdir", "")
    if "\0" in command + workdir:
        raise ToolError("a command cannot hold a NUL character")
    shell = await open_shell(context)
    if arguments["background"]:
        return await start_background(context, command, shell.background_command(command, workdir))
    timeout_s = arguments["timeout"]
    result = await context.sandbox.exec(
        shell.command(command, workdir), timeout_s=timeout_s, max_output_bytes=MAX_OUTPUT_BYTES
    )
    if not workdir:
        shell.is_folder_stale = True
    _check_workdir(shell, workdir, result)
    output = _readable(result)
    if result.timed_out:
        notice = f"[Command timed out after {timeout_s}s]"
        output = f"{output}\n{notice}" if output else notice
    content = {"output": output, "exit_code": result.returncode, "error": None}
    meaning = explain_exit(command, result.returncode)
    if meaning:
        content["exit_code_meaning"] = meaning
    return ToolResult(content, failed=result.timed_out, timed_out=result.timed_out)


MAX_EXPLAINED_CHARS = 10_000
"""Taking a longer command apart costs more than the hint is worth."""


def explain_exit(command: str, returncode: int) -> str:
    """What exit status 1 of the last program in a command says, when it is an answer; else empty."""
    if returncode != 1 or len(command) > MAX_EXPLAINED_CHARS:
        return ""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.commenters = " \t\r", ""
    words: list[str] = []
    try:
        for token in lexer:
            if not _SEPARATOR.fullmatch(token):
                words.append(token)
            elif token.strip("\n"):
                words = []
            elif words and token:
                words = [*words, "\n"]
    except ValueError:
        return ""
    last_line = " ".join(words).strip().split("\n")[-1].split()
    program = [word for word in last_line if not _ASSIGNMENT.fullmatch(word)]
    name = program[0].rpartition("/")[2] if program else ""
    return MEANING_OF_EXIT_1.get(name) or MEANING_OF_EXIT_1.get(" ".join(program[:2]), "")


def _check_workdir(shell: Shell, workdir: str, result: ExecResult) -> None:
    if workdir and result.returncode == 126 and result.output.decode(errors="replace") == shell.no_workdir:
        raise ToolError(f"workdir {workdir!r} does not exist or is not a folder; the command was not run")


def _readable(result: ExecResult) -> str:
    seam = result.head_bytes if result.omitted_bytes else len(result.output)
    head, tail = (strip_escapes(part.decode(errors="replace")) for part in (result.output[:seam], result.output[seam:]))
    if not result.omitted_bytes:
        head = head.rstrip()
    return cut_middle(head, tail.rstrip(), result.omitted_bytes, MAX_OUTPUT_CHARS)


TERMINAL = Tool(
    name="terminal",
    description=(
        "Run a bash command and return its output (stdout and stderr together) and exit code. The current "
        "folder and exported variables last from one call to the next. Commands get no input and no "
        "terminal, so use non-interactive flags. For servers and long jobs set background=true and follow "
        "them with the process tool."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The bash command, one or more lines."},
            "background": {
                "type": "boolean",
                "default": False,
                "description": "Return at once with a session_id for the process tool. Default false.",
            },
            "timeout": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TIMEOUT_S,
                "default": DEFAULT_TIMEOUT_S,
                "description": (
                    f"Seconds after which the command is killed. Default {DEFAULT_TIMEOUT_S}, at most "
                    f"{MAX_TIMEOUT_S}. Background commands have no limit."
                ),
            },
            "workdir": {
                "type": "string",
                "description": "Folder to run this one command in. Default: the current folder.",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    run=run_terminal,
)
