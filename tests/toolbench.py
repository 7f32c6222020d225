"""The tools of the catalog at hand for a test, called as a model calls them. Fixtures: `toolbench_fixtures`."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolsets.base import ToolContext
from toolsets.catalog import TOOLS, load_tool
from toolsets.execute import ToolOutcome, execute_call
from toolsets.sandboxes.base import Sandbox


@dataclass
class Answer:
    """One call's outcome, its content parsed."""

    outcome: ToolOutcome
    content: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    @property
    def error(self) -> str:
        """The error that the model reads; the call must have failed."""
        assert self.outcome.failed, self.content
        return str(self.content["error"])


class Bench:
    """The tools of one sample, at hand for a test."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.context = ToolContext(sandbox)
        self.tools = {name: load_tool(name) for name in TOOLS}

    async def call(self, name: str, **arguments: Any) -> Answer:
        """Call a tool, whatever becomes of it."""
        outcome = await execute_call(self.tools, self.context, name, json.dumps(arguments))
        return Answer(outcome, json.loads(outcome.content))

    async def ok(self, name: str, **arguments: Any) -> Answer:
        """Call a tool; it must not fail."""
        answer = await self.call(name, **arguments)
        assert not answer.outcome.failed, answer.content
        return answer

    async def sh(self, command: str, **arguments: Any) -> str:
        """Run a command in the terminal; it must exit with 0."""
        answer = await self.ok("terminal", command=command, **arguments)
        assert answer["exit_code"] == 0, answer.content
        return str(answer["output"])

    async def put(self, path: str, data: bytes) -> None:
        """Make a file in the working folder."""
        await self.sandbox.write_file(path, data)

    async def get(self, path: str) -> bytes:
        """Read a file of the working folder."""
        return await self.sandbox.read_file(path, max_bytes=50_000_000)


def cpu_s(function: Callable[[str], object], text: str) -> float:
    """What a function takes for a text, in seconds of this process."""
    begun_s = time.process_time()
    function(text)
    return time.process_time() - begun_s


def grows_with_length(function: Callable[[str], object], small: str, large: str) -> bool:
    """Whether four times the text takes about four times as long; a busy machine has three tries."""
    for _ in range(3):
        short_s = cpu_s(function, small)
        if short_s > 2:
            return False
        long_s = cpu_s(function, large)
        if long_s < max(0.2, 12 * short_s):
            return True
    return False
