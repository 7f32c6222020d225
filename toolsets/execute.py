"""One tool call, fenced: whatever the model sent and whatever the tool does, the model gets a result to read.

Only two things pass the fence: `SandboxError`, for without its sandbox a sample cannot go on, and
cancellation. Whether a call failed is said by the tool that ran it; no text is ever searched for the word
"error".
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from toolsets.arguments import ArgumentsError, check_arguments, parse_arguments
from toolsets.base import MAX_RESULT_CHARS, Tool, ToolContext, ToolError
from toolsets.sandboxes.base import SandboxError
from toolsets.text import clean_surrogates, masked, shortened

FailureKind = Literal["", "invalid_arguments", "unknown_tool", "tool_error", "timeout", "crash"]

MAX_DEPTH = 100
"""Levels of a result that are kept."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What became of one call."""

    content: str
    """JSON object as text, at most `MAX_RESULT_CHARS` characters: what the model reads and the row keeps."""
    failed: bool
    kind: FailureKind
    """Why it failed; empty when it did not."""
    duration_s: float


async def execute_call(tools: Mapping[str, Tool], context: ToolContext, name: str, arguments_json: str) -> ToolOutcome:
    """Run one tool call as a model wrote it.

    Args:
        tools: The tools the model was offered, by name.
        context: The sample's sandbox and memory.
        name: The tool the model named, whether it exists or not.
        arguments_json: The arguments as the model wrote them.

    Raises:
        SandboxError: the sample's sandbox no longer answers.
    """
    started_s = context.clock()
    content, kind = await _answer(tools, context, name, arguments_json)
    return ToolOutcome(encode_result(content), bool(kind), kind, context.clock() - started_s)


def encode_result(content: Mapping[str, Any]) -> str:
    """Write a result as JSON text of at most `MAX_RESULT_CHARS`, non-ASCII kept, whatever it holds."""
    try:
        text = orjson.dumps(content).decode()
    except (TypeError, ValueError, RecursionError):
        text = orjson.dumps(_jsonable(content)).decode()
    if len(text) <= MAX_RESULT_CHARS:
        return text
    preview = masked(text)[: MAX_RESULT_CHARS // 2]
    while True:
        # Quoting the JSON text again lengthens it by what it escapes, so the preview shrinks until it fits.
        notice = f"Result of {len(text)} characters cut to its first {len(preview)}; ask for a smaller part."
        cut = orjson.dumps({"truncated": True, "notice": notice, "preview": preview}).decode()
        if len(cut) <= MAX_RESULT_CHARS:
            return cut
        preview = preview[: len(preview) // 2]


async def _answer(
    tools: Mapping[str, Tool], context: ToolContext, name: str, arguments_json: str
) -> tuple[Mapping[str, Any], FailureKind]:
    tool = tools.get(name)
    if tool is None:
        known = ", ".join(tools) or "none"
        return {"error": f"Tool {shortened(name, 100)!r} does not exist. Available tools: {known}"}, "unknown_tool"
    try:
        arguments = check_arguments(parse_arguments(arguments_json), tool.parameters)
        result = await tool.run(context, arguments)
    except ArgumentsError as exc:
        return {"error": f"Invalid arguments for {name}: {exc}"}, "invalid_arguments"
    except ToolError as exc:
        return {"error": str(exc), **exc.details}, "tool_error"
    except SandboxError:
        raise
    except Exception as exc:  # noqa: BLE001 - the fence: a defect in a tool costs the call only
        _log.exception("tool %s crashed in sample %s", name, context.sandbox.spec.label)
        return {"error": f"{type(exc).__name__}: {exc}"}, "crash"
    if result.timed_out:
        return result.content, "timeout"
    return result.content, "tool_error" if result.failed else ""


def _jsonable(value: Any, depth: int = 0) -> Any:
    """Replace what JSON cannot hold: lone surrogates, bytes, huge integers, other objects, deep nesting."""
    if isinstance(value, str):
        return clean_surrogates(value)
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if depth == MAX_DEPTH:
        return "[nested too deeply]"
    if isinstance(value, Mapping):
        return {clean_surrogates(str(key)): _jsonable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item, depth + 1) for item in value]
    return clean_surrogates(str(value))
