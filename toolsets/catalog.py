"""Which tools there are, and the toolsets that group them.

A new tool is one new file under `tools/` and one line in `TOOLS` (and its name in a toolset). Modules are
imported when a tool of theirs is asked for, so a tool that needs an optional library costs nothing until
then.
"""

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from toolsets.base import Tool, ToolsetError

TOOLS: dict[str, str] = {
    "terminal": "toolsets.tools.terminal:TERMINAL",
    "process": "toolsets.tools.process:PROCESS",
    "read_file": "toolsets.tools.files:READ_FILE",
    "write_file": "toolsets.tools.files:WRITE_FILE",
    "patch": "toolsets.tools.patch:PATCH",
    "search_files": "toolsets.tools.search:SEARCH_FILES",
}
"""Tool name -> "module:attribute". The order is the order in which a model is offered its tools."""


@dataclass(frozen=True, slots=True)
class Toolset:
    """Tools that are given to a model together."""

    description: str
    tools: tuple[str, ...] = ()
    """Keys of `TOOLS`."""
    missing: str = ""
    """Why it cannot be used here; empty when it can."""


_LATER = "not part of this version"

TOOLSETS: dict[str, Toolset] = {
    "terminal": Toolset("Run shell commands and manage background processes.", ("terminal", "process")),
    "file": Toolset("Read, write, patch and search files.", ("read_file", "write_file", "patch", "search_files")),
    "web": Toolset("Search the web and read pages.", missing=_LATER),
    "vision": Toolset("Look at images.", missing=_LATER),
    "image_gen": Toolset("Make images from a description.", missing=_LATER),
    "browser": Toolset("Drive a web browser.", missing=_LATER),
}


def load_tool(name: str) -> Tool:
    """Import one tool.

    Raises:
        ToolsetError: no tool has that name.
    """
    if name not in TOOLS:
        raise ToolsetError(unknown_name("tool", name, TOOLS))
    module, _, attribute = TOOLS[name].partition(":")
    tool: Tool = getattr(importlib.import_module(module), attribute)
    return tool


def tools_in(toolset_names: Iterable[str]) -> list[Tool]:
    """Load the tools of some toolsets, each once, in catalog order. A toolset that is missing here has none.

    Raises:
        ToolsetError: no toolset has one of those names.
    """
    wanted = {tool for name in toolset_names for tool in _toolset(name).tools}
    return [load_tool(name) for name in TOOLS if name in wanted]


def unavailable(toolset_names: Iterable[str]) -> dict[str, str]:
    """Say which of some toolsets cannot be used here, and why.

    Raises:
        ToolsetError: no toolset has one of those names.
    """
    return {name: _toolset(name).missing for name in toolset_names if _toolset(name).missing}


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Word the error about a name that is not known: the nearest known one first, then all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {kind} {name!r}; {suggestion}known: {', '.join(known)}"


def _toolset(name: str) -> Toolset:
    if name not in TOOLSETS:
        raise ToolsetError(unknown_name("toolset", name, TOOLSETS))
    return TOOLSETS[name]
