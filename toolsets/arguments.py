"""Arguments of a tool call: from the JSON text a model wrote to values that fit the tool's schema.

Understood of JSON schema: `type` (one or a list), `enum`, `minimum`, `maximum`, `minLength`, `items`,
`properties`, `required`, `additionalProperties: false`, `default`. A value of another type is converted only
where it can mean one thing ("5" or 5.0 for an integer, "true" for a boolean); all else is an error worded
for the model that made it.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from toolsets.base import ToolError
from toolsets.text import clean_surrogates, masked, shortened

Schema = Mapping[str, Any]

MAX_QUOTED_CHARS = 80
"""How much of a wrong value an error repeats."""

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,2})?", re.ASCII)
_BOOLEANS = {"true": True, "false": False}


class ArgumentsError(ToolError):
    """The arguments are not JSON, or do not fit the tool's schema."""


def parse_arguments(arguments_json: str) -> dict[str, Any]:
    """Read the JSON object of a call; nothing, blank and `null` mean no arguments.

    Raises:
        ArgumentsError: it is not JSON, or not an object.
    """
    if not arguments_json.strip():
        return {}
    try:
        value = clean_surrogates(json.loads(arguments_json, parse_constant=_refuse_constant))
    except RecursionError:
        raise ArgumentsError("arguments are nested too deeply") from None
    except ValueError as exc:
        position = exc.pos if isinstance(exc, json.JSONDecodeError) else 0
        place = len(masked(arguments_json[:position]))
        around = masked(arguments_json)[max(0, place - 40) : place + 40]
        raise ArgumentsError(f"arguments are not valid JSON: {exc}; near {around!r}") from exc
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ArgumentsError(f"arguments must be a JSON object, not {_describe(value)}")
    return value


def check_arguments(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Fit arguments to a tool's schema: convert, fill defaults in, refuse the rest.

    Args:
        arguments: What the model sent.
        schema: The tool's `parameters`.

    Returns:
        A new mapping in the order of the schema's properties. An optional argument that is null counts as
        absent.

    Raises:
        ArgumentsError: names everything that is wrong, so that one more try can mend it all.
    """
    problems: list[str] = []
    checked = _object(arguments, schema, "", problems)
    if problems:
        raise ArgumentsError("; ".join(problems))
    return checked


def _object(value: Mapping[str, Any], schema: Schema, path: str, problems: list[str]) -> dict[str, Any]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    checked: dict[str, Any] = {}
    for name, expected in properties.items():
        is_absent = name not in value or (value[name] is None and "null" not in _types(expected))
        if not is_absent:
            checked[name] = _value(value[name], expected, f"{path}{name}", problems)
        elif name in required:
            problems.append(f"missing required parameter {path + name!r}")
        elif "default" in expected:
            checked[name] = expected["default"]
    unknown = [name for name in value if name not in properties]
    if schema.get("additionalProperties", True) is False:
        problems.extend(_unknown_parameter(path, name, properties) for name in unknown)
    else:
        checked.update({name: value[name] for name in unknown})
    return checked


def _value(value: Any, schema: Schema, path: str, problems: list[str]) -> Any:
    types = _types(schema)
    if types and not any(_is_type(value, name) for name in types):
        converted = next((new for name in types if (new := _convert(value, name)) is not None), None)
        if converted is None:
            problems.append(f"{path!r} must be {_wanted(types)}, not {_describe(value)}")
            return value
        value = converted
    if "integer" in types and isinstance(value, float) and "number" not in types:
        value = int(value)
    if (problem := _limit_broken(value, schema)) is not None:
        problems.append(f"{path!r} {problem}")
    if isinstance(value, list) and "items" in schema:
        return [_value(item, schema["items"], f"{path}[{i}]", problems) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and "properties" in schema:
        return _object(value, schema, f"{path}.", problems)
    return value


def _limit_broken(value: Any, schema: Schema) -> str | None:
    if "enum" in schema and value not in schema["enum"]:
        known = [str(choice) for choice in schema["enum"]]
        nearest = difflib.get_close_matches(str(value)[:MAX_QUOTED_CHARS], known, n=1)
        suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return f"must be one of {', '.join(known)}, not {_quote(value)}{suggestion}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            return f"must be at least {schema['minimum']}, not {_quote(value)}"
        if "maximum" in schema and value > schema["maximum"]:
            return f"must be at most {schema['maximum']}, not {_quote(value)}"
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        return "must not be empty"
    return None


def _unknown_parameter(path: str, name: str, properties: Mapping[str, Schema]) -> str:
    nearest = difflib.get_close_matches(name[:MAX_QUOTED_CHARS], properties, n=1)
    known = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(properties) or 'none'}"
    return f"unknown parameter {_quote(path + name)} ({known})"


def _types(schema: Schema) -> tuple[str, ...]:
    declared = schema.get("type", ())
    return (declared,) if isinstance(declared, str) else tuple(declared)


def _is_whole(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or value.is_integer())


_TYPE_TESTS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": _is_whole,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
    "null": lambda value: value is None,
}


def _is_type(value: Any, name: str) -> bool:
    return _TYPE_TESTS[name](value)


def _convert(value: Any, name: str) -> Any:
    """Read a value as another type where that can mean only one thing; None where it cannot."""
    if name == "string" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    if name == "integer" and _INTEGER.fullmatch(text):
        return int(text)
    if name == "number" and _NUMBER.fullmatch(text):
        return int(text) if _INTEGER.fullmatch(text) else float(text)
    if name == "boolean":
        return _BOOLEANS.get(text.lower())
    if name in ("array", "object") and text[:1] == ("[" if name == "array" else "{"):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return parsed if _is_type(parsed, name) else None
    return None


def _wanted(types: tuple[str, ...]) -> str:
    return " or ".join(f"an {name}" if name[0] in "aio" else f"a {name}" for name in types)


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    name = next((name for name in _TYPE_TESTS if _is_type(value, name)), type(value).__name__)
    return f"the {name} {_quote(value)}"


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_QUOTED_CHARS else shortened(text, MAX_QUOTED_CHARS) + "…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
