"""Saved rows in the formats that trainers read. Registry: name -> "module:function".

An export function takes a row of `trajectories.jsonl` and returns the row in its own format, or None when the format
cannot hold it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from promptmill.errors import ConfigError

EXPORTS: dict[str, str] = {
    "sharegpt": "promptmill.exports.sharegpt:export_row",
    "hermes": "promptmill.exports.hermes:export_row",
}

ExportFunction = Callable[[Mapping[str, Any]], dict[str, Any] | None]


def load_export(name: str) -> ExportFunction:
    """The export function of a format. Raises ConfigError for an unknown name."""
    if name not in EXPORTS:
        raise ConfigError(f"unknown format {name!r}; known: {', '.join(EXPORTS)}")
    module, _, attribute = EXPORTS[name].partition(":")
    function: ExportFunction = getattr(import_module(module), attribute)
    return function
