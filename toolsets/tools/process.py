"""Background processes of a sample: follow them, feed them, end them."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolsets.base import Tool, ToolContext, ToolError, ToolResult
from toolsets.sandboxes.base import BackgroundProcess
from toolsets.text import ending, shortened, strip_escapes

MAX_PROCESSES = 64
BUFFER_BYTES = 200_000
PREVIEW_CHARS = 1_000
MAX_WAIT_OUTPUT_CHARS = 50_000
MAX_COMMAND_CHARS = 500
DEFAULT_LINES = 200
DEFAULT_WAIT_S = 180
MAX_WAIT_S = 600
WRITE_TIMEOUT_S = 5


@dataclass(slots=True)
class Session:
    """One background process and what is known about it."""

    session_id: str
    command: str
    process: BackgroundProcess
    started_s: float

    def describe(self, context: ToolContext) -> dict[str, Any]:
        """The keys that every answer about this process begins with."""
        returncode = self.process.returncode
        described: dict[str, Any] = {
            "session_id": self.session_id,
            "command": shortened(self.command, MAX_COMMAND_CHARS),
            "status": "running" if returncode is None else "exited",
            "pid": self.process.pid,
            "uptime_seconds": int(context.clock() - self.started_s),
        }
        if returncode is not None:
            described["exit_code"] = returncode
        return described

    def text(self) -> str:
        """What it printed, as far as it is still kept."""
        return strip_escapes(self.process.output()[0].decode(errors="replace"))


async def start_background(context: ToolContext, command: str, script: str) -> ToolResult:
    """Start a background process for the `terminal` tool.

    Args:
        context: The sample's sandbox and memory.
        command: What the model asked for, to be shown.
        script: What bash is given.
    """
    sessions = _sessions(context)
    if len(sessions) >= MAX_PROCESSES:
        ended = next((key for key, value in sessions.items() if value.process.returncode is not None), None)
        if ended is None:
            raise ToolError(f"{MAX_PROCESSES} background processes are running; kill one of them first")
        del sessions[ended]
    process = await context.sandbox.spawn(script, max_output_bytes=BUFFER_BYTES)
    session = Session(f"proc_{secrets.token_hex(6)}", command, process, context.clock())
    sessions[session.session_id] = session
    return ToolResult(
        {
            "output": "Background process started",
            "session_id": session.session_id,
            "pid": process.pid,
            "exit_code": 0,
            "error": None,
        }
    )


async def run_process(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Answer one `process` call."""
    action = arguments["action"]
    sessions = _sessions(context)
    if action == "list":
        return ToolResult({"processes": [session.describe(context) for session in sessions.values()]})
    session_id = arguments.get("session_id", "")
    if not session_id:
        raise ToolError(f"action {action!r} needs a session_id; action 'list' shows those there are")
    if session_id not in sessions:
        raise ToolError(f"no background process {shortened(session_id, 100)!r}", status="not_found")
    return await _ACTIONS[action](context, sessions[session_id], arguments)


async def _poll(context: ToolContext, session: Session, _: Mapping[str, Any]) -> ToolResult:
    preview = ending(session.text(), PREVIEW_CHARS).strip()
    return ToolResult({**session.describe(context), "output_preview": preview})


async def _log(context: ToolContext, session: Session, arguments: Mapping[str, Any]) -> ToolResult:
    lines = session.text().split("\n")
    if lines[-1] == "":
        lines.pop()
    limit = arguments["limit"]
    start = arguments["offset"] - 1 if "offset" in arguments else max(0, len(lines) - limit)
    shown = lines[start : start + limit]
    output = "\n".join(shown)
    content = {
        **session.describe(context),
        "output": ending(output, MAX_WAIT_OUTPUT_CHARS),
        "total_lines": len(lines),
        "showing": f"{len(shown)} lines",
    }
    if len(output) > MAX_WAIT_OUTPUT_CHARS:
        content["notice"] = f"only the last {MAX_WAIT_OUTPUT_CHARS} characters of these lines are shown"
    dropped_bytes = session.process.output()[1]
    if dropped_bytes:
        content["dropped_bytes"] = dropped_bytes
    return ToolResult(content)


async def _wait(context: ToolContext, session: Session, arguments: Mapping[str, Any]) -> ToolResult:
    timeout_s = arguments.get("timeout", DEFAULT_WAIT_S)
    has_ended = await session.process.wait(timeout_s)
    content = {**session.describe(context), "output": ending(session.text(), MAX_WAIT_OUTPUT_CHARS).rstrip()}
    if not has_ended:
        content |= {"status": "timeout", "notice": f"still running after {timeout_s}s"}
    return ToolResult(content)


async def _kill(context: ToolContext, session: Session, _: Mapping[str, Any]) -> ToolResult:
    if session.process.returncode is not None:
        return ToolResult({**session.describe(context), "status": "already_exited"})
    await session.process.kill()
    return ToolResult({**session.describe(context), "status": "killed"})


async def _write(context: ToolContext, session: Session, arguments: Mapping[str, Any]) -> ToolResult:
    if "data" not in arguments:
        raise ToolError(f"action {arguments['action']!r} needs data")
    data = (arguments["data"] + ("\n" if arguments["action"] == "submit" else "")).encode()
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await session.process.write(data)
    except BrokenPipeError as exc:
        raise ToolError(f"{session.session_id} takes no more input", **session.describe(context)) from exc
    except TimeoutError as exc:
        raise ToolError(
            f"process {session.session_id} did not read its input for {WRITE_TIMEOUT_S}s; "
            "an unknown part of the data was written"
        ) from exc
    return ToolResult({"status": "ok", "bytes_written": len(data)})


async def _close(context: ToolContext, session: Session, _: Mapping[str, Any]) -> ToolResult:
    await session.process.close_stdin()
    return ToolResult({"status": "ok", "message": "stdin closed"})


def _sessions(context: ToolContext) -> dict[str, Session]:
    sessions: dict[str, Session] = context.state.setdefault("process", {})
    return sessions


_ACTIONS: dict[str, Callable[[ToolContext, Session, Mapping[str, Any]], Awaitable[ToolResult]]] = {
    "poll": _poll,
    "log": _log,
    "wait": _wait,
    "kill": _kill,
    "write": _write,
    "submit": _write,
    "close": _close,
}

PROCESS = Tool(
    name="process",
    description=(
        "Manage background processes started with terminal(background=true). Actions: list (all of them), "
        "poll (status and latest output), log (output by lines), wait (for its end), kill, write (send data "
        "as is), submit (send data and a newline), close (end its input)."
    ),
    parameters={
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["list", *_ACTIONS], "description": "What to do."},
            "session_id": {
                "type": "string",
                "description": "The process, as named by terminal. Needed for every action but list.",
            },
            "data": {"type": "string", "description": "Text for write and submit."},
            "timeout": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_WAIT_S,
                "default": DEFAULT_WAIT_S,
                "description": f"Seconds that wait waits. Default {DEFAULT_WAIT_S}, at most {MAX_WAIT_S}.",
            },
            "offset": {
                "type": "integer",
                "minimum": 1,
                "description": "First line for log, from 1. Default: so that the last lines are shown.",
            },
            "limit": {
                "type": "integer",
                "minimum": 1,
                "default": DEFAULT_LINES,
                "description": f"How many lines log shows. Default {DEFAULT_LINES}.",
            },
        },
        "required": ["action"],
        "additionalProperties": False,
    },
    run=run_process,
)
