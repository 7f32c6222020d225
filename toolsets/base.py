"""What a tool is: a schema the model reads, and a coroutine that answers a call.

Two kinds of failure
    `ToolError` is something the model can mend (a wrong path, a bad argument): it becomes the call's result.
    `SandboxError` means the sample's environment is gone: it ends the sample.

This room knows nothing of models or batches, so a tool can be tried with a sandbox and a dictionary.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolsets.sandboxes.base import Sandbox

MAX_RESULT_CHARS = 100_000
"""A result longer than this is cut by the tool that made it, which says so in the result."""


class ToolsetError(ValueError):
    """A name or a combination that a person asked for cannot be had; the message says what can."""


class ToolError(Exception):
    """The call failed in a way the model can mend; the message is the call's result, as its `error`."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        """Further keys of the result that help to mend it, such as `similar_files`."""


@dataclass(slots=True)
class ToolContext:
    """What the tools of one sample share. Made fresh for each sample, dropped with it."""

    sandbox: Sandbox
    state: dict[str, Any] = field(default_factory=dict)
    """Memory of the tools within the sample (current folder, background processes), by the owner's name."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since some fixed moment."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call gave back."""

    content: Mapping[str, Any]
    """JSON-ready; this object, encoded, is exactly what the model reads and the row keeps."""
    failed: bool = False
    """Whether the tool did not do what it was asked. A command's non-zero exit status is not a failure."""
    timed_out: bool = False
    """Whether it failed because a deadline passed; goes with `failed`."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, with `properties`, `required` and `additionalProperties: false`."""
    run: Callable[[ToolContext, Mapping[str, Any]], Awaitable[ToolResult]]
    """Called with arguments that fit `parameters`, each absent one that has a `default` filled in.

    May raise ToolError or SandboxError.
    """

    def schema(self) -> dict[str, Any]:
        """The tool as the chat-completions API wants it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
