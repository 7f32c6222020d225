"""Arguments of a call: what can mean one thing is understood, what is wrong is named."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolsets.arguments import ArgumentsError, check_arguments, parse_arguments
from toolsets.base import ToolError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1},
        "count": {"type": "integer", "minimum": 1, "maximum": 600, "default": 7},
        "ratio": {"type": "number"},
        "is_on": {"type": "boolean", "default": False},
        "mode": {"type": "string", "enum": ["replace", "patch"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "nested": {
            "type": "object",
            "properties": {"depth": {"type": "integer"}},
            "required": ["depth"],
            "additionalProperties": False,
        },
        "either": {"type": ["integer", "null"]},
    },
    "required": ["text"],
    "additionalProperties": False,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TYPES: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "count": int,
    "ratio": (int, float),
    "is_on": bool,
    "mode": str,
    "names": list,
    "nested": dict,
    "either": (int, type(None)),
}


def check(**arguments: Any) -> dict[str, Any]:
    return check_arguments({"text": "x", **arguments}, SCHEMA)


@pytest.mark.parametrize("text", ["", "  \n", "null", "{}", " { } "])
def test_nothing_blank_and_null_are_no_arguments(text: str) -> None:
    assert parse_arguments(text) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": }', "not valid JSON: Expecting value: line 1 column 7 (char 6); near '{\"a\": }'"),
        ("[1]", "must be a JSON object, not the array [1]"),
        ('"x"', 'not the string "x"'),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": "line\nbreak"}', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5_000 + "}", "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_quoted_back(text: str, message: str) -> None:
    with pytest.raises(ArgumentsError) as raised:
        parse_arguments(text)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", "5", 5),
        ("count", 5.0, 5),
        ("count", " 12 ", 12),
        ("count", None, 7),
        ("ratio", "1.5e3", 1500.0),
        ("ratio", "-2", -2),
        ("ratio", 3, 3),
        ("is_on", "true", True),
        ("is_on", "False", False),
        ("text", 12, "12"),
        ("names", '["a", "b"]', ["a", "b"]),
        ("nested", '{"depth": "3"}', {"depth": 3}),
        ("nested", {"depth": 3.0}, {"depth": 3}),
        ("either", None, None),
        ("either", "4", 4),
    ],
)
def test_what_can_mean_one_thing_is_understood(name: str, value: Any, expected: Any) -> None:
    found = check(**{name: value})[name]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": "five"}, "'count' must be an integer, not the string \"five\""),
        ({"count": 5.5}, "'count' must be an integer, not the number 5.5"),
        ({"count": True}, "'count' must be an integer, not the boolean true"),
        ({"count": "1e1"}, "'count' must be an integer"),
        ({"count": 0}, "'count' must be at least 1, not 0"),
        ({"count": "601"}, "'count' must be at most 600, not 601"),
        ({"is_on": 1}, "'is_on' must be a boolean, not the integer 1"),
        ({"is_on": "yes"}, "'is_on' must be a boolean"),
        ({"text": ""}, "'text' must not be empty"),
        ({"text": {"a": 1}}, "'text' must be a string, not the object"),
        ({"mode": "replce"}, "'mode' must be one of replace, patch, not \"replce\" (did you mean 'replace'?)"),
        ({"names": ["a", 1.5]}, "'names[1]' must be a string"),
        ({"names": "a"}, "'names' must be an array"),
        ({"nested": {}}, "missing required parameter 'nested.depth'"),
        ({"nested": {"depht": 1, "depth": 1}}, "unknown parameter \"nested.depht\" (did you mean 'depth'?)"),
        ({"txt": "x"}, "unknown parameter \"txt\" (did you mean 'text'?)"),
        ({"zzz": 1}, 'unknown parameter "zzz" (known: text, count'),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError) as raised:
        check(**arguments)
    assert message in str(raised.value)


def test_what_an_error_repeats_is_masked_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-of-the-runner-1"
    monkeypatch.setattr("toolsets.text._mask", lambda text: text.replace(secret, "***"))
    for written in (f'{{"text": {"y" * 30}{secret}zz" oops', f'{{"text": "{secret}{"y" * 20}" oops'):
        with pytest.raises(ArgumentsError) as raised:
            parse_arguments(written)
        assert not any(part in str(raised.value) for part in (secret[:6], secret[-6:]))
    with pytest.raises(ArgumentsError) as raised:
        check_arguments({"text": "x", "count": "y" * 70 + secret}, SCHEMA)
    assert secret[:6] not in str(raised.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ArgumentsError) as raised:
        check_arguments({"count": 0, "zzz": 1, "text": None}, SCHEMA)
    for part in ("missing required parameter 'text'", "'count' must be at least 1", '"zzz"'):
        assert part in str(raised.value)


def test_defaults_are_filled_in_and_the_order_is_the_schemas() -> None:
    assert list(check_arguments({"is_on": True, "text": "x"}, SCHEMA).items()) == [
        ("text", "x"),
        ("count", 7),
        ("is_on", True),
    ]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "other"]), JSON))
def test_any_json_is_refused_or_becomes_what_the_schema_says(arguments: dict[str, Any]) -> None:
    try:
        checked = check_arguments(arguments, SCHEMA)
    except ArgumentsError as exc:
        assert str(exc)  # noqa: PT017 - either end is right, and this is what one of them must be
        return
    assert "text" in checked
    assert set(checked) <= set(SCHEMA["properties"])
    for name, value in checked.items():
        assert isinstance(value, TYPES[name])
        assert name == "is_on" or not isinstance(value, bool)
    assert 1 <= checked["count"] <= 600
    assert check_arguments(checked, SCHEMA) == checked


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(list(SCHEMA["properties"])), JSON))
def test_values_of_the_right_type_are_never_altered(arguments: dict[str, Any]) -> None:
    try:
        checked = check_arguments(arguments, SCHEMA)
    except ArgumentsError:
        return
    for name in ("text", "mode"):
        if isinstance(arguments.get(name), str):
            assert checked[name] == arguments[name]
