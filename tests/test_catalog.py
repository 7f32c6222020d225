"""The catalog: every tool and toolset of it is what it says."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from toolsets.base import ToolsetError
from toolsets.catalog import TOOLS, TOOLSETS, load_tool, tools_in, unavailable

NAMED_BY_DISTRIBUTIONS = {"web", "vision", "image_gen", "terminal", "file", "browser"}


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_loads_under_its_name_and_describes_every_parameter(name: str) -> None:
    tool = load_tool(name)
    assert tool.name == name
    assert 20 < len(tool.description) < 1_000
    assert tool.parameters["type"] == "object"
    assert tool.parameters["additionalProperties"] is False
    assert set(tool.parameters["required"]) <= set(tool.parameters["properties"])
    for parameter, schema in tool.parameters["properties"].items():
        assert schema["description"].endswith("."), parameter
        if "default" in schema and schema["type"] != "boolean":
            assert str(schema["default"]).replace(".", "the current folder") in schema["description"], parameter
    assert tool.schema()["function"]["name"] == name


def test_every_tool_of_a_toolset_is_in_the_catalog_and_every_tool_in_a_toolset() -> None:
    assert {tool for toolset in TOOLSETS.values() for tool in toolset.tools} == set(TOOLS)
    assert set(TOOLSETS) == NAMED_BY_DISTRIBUTIONS


def test_a_toolset_has_tools_or_a_reason_why_not() -> None:
    for name, toolset in TOOLSETS.items():
        assert bool(toolset.tools) != bool(toolset.missing), name
        assert toolset.description.endswith(".")


def test_tools_come_once_and_in_catalog_order_whatever_the_order_of_toolsets() -> None:
    names = [tool.name for tool in tools_in(["file", "web", "terminal", "file"])]
    assert names == ["terminal", "process", "read_file", "write_file", "patch", "search_files"]
    assert tools_in([]) == []


def test_what_is_not_available_is_told_with_its_reason() -> None:
    assert unavailable(["terminal", "web", "file"]) == {"web": "not part of this version"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_tool("terminl"), "unknown tool 'terminl'; did you mean 'terminal'? known: patch, "),
        (lambda: tools_in(["files"]), "unknown toolset 'files'; did you mean 'file'? known: browser, "),
        (lambda: unavailable(["moa"]), "unknown toolset 'moa'; known: browser, file, "),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest_and_the_known(call: object, message: str) -> None:
    with pytest.raises(ToolsetError) as raised:
        call()  # type: ignore[operator]
    assert str(raised.value).startswith(message)


def test_the_schemas_of_all_tools_are_worth_their_tokens() -> None:
    assert sum(len(orjson.dumps(load_tool(name).schema())) for name in TOOLS) < 6_500


def test_the_catalog_and_the_distributions_import_no_tool_and_nothing_heavy() -> None:
    script = (
        "import sys; import toolsets.catalog, toolsets.distributions; "
        "print([m for m in sys.modules if m.startswith('toolsets.tools.') or m in ('rich', 'openai', 'asyncio')])"
    )
    project = Path(__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=project, check=True)
    assert result.stdout.strip() == "[]"
