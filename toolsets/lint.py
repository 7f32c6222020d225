"""A look at a file just written, so that a model hears of a syntax error at once. Nothing is executed.

Python, JSON and TOML are parsed by the runner, which the text may try to stall: a dotted name of 100,000
parts keeps Python's parser busy for half a minute, and models that repeat themselves write such things.
Hence the bounds.
"""

import ast
import json
import tomllib
import warnings
from collections.abc import Callable

from toolsets.text import shortened

MAX_CHARS = 100_000
MAX_LINE_CHARS = 5_000
MAX_MESSAGE_CHARS = 500


def lint(path: str, text: str) -> dict[str, str]:
    """Check the syntax of a file by the ending of its name.

    Returns:
        `status` ok, error (with the `output` of the parser) or skipped (with a `message` that says why).
    """
    parse = PARSERS.get(path.rpartition(".")[2].lower()) if "." in path.rpartition("/")[2] else None
    if parse is None:
        return {"status": "skipped", "message": "no checker for this kind of file"}
    if len(text) > MAX_CHARS or max(map(len, text.split("\n"))) > MAX_LINE_CHARS:
        return {"status": "skipped", "message": "too long to check"}
    try:
        parse(text)
    except SyntaxError as exc:
        return _error(f"line {exc.lineno}: {exc.msg}" if exc.lineno else str(exc.msg))
    except (ValueError, RecursionError, MemoryError) as exc:
        return _error(str(exc) or type(exc).__name__)
    return {"status": "ok"}


def _error(message: str) -> dict[str, str]:
    return {"status": "error", "output": shortened(message, MAX_MESSAGE_CHARS)}


def _parse_python(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape such as "\d" is a warning, not a syntax error
        ast.parse(text)


PARSERS: dict[str, Callable[[str], object]] = {
    "py": _parse_python,
    "pyi": _parse_python,
    "json": json.loads,
    "toml": tomllib.loads,
}
"""Ending of a file's name -> what parses such files."""
