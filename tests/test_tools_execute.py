"""The fence around a tool call: there is always a result, and only a lost sandbox passes."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toolbench import Bench, grows_with_length
from toolsets.base import MAX_RESULT_CHARS, Tool, ToolContext, ToolError, ToolResult
from toolsets.execute import encode_result, execute_call
from toolsets.sandboxes.base import SandboxError
from toolsets.text import cut_middle, strip_escapes

pytest_plugins = ["tests.toolbench_fixtures"]


def tool_that(action: Any) -> dict[str, Tool]:
    """A tool `act` that gives back `action`, or raises it."""

    async def run(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
        if isinstance(action, BaseException):
            raise action
        return action if isinstance(action, ToolResult) else ToolResult(action)

    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "default": 1}},
        "required": [],
        "additionalProperties": False,
    }
    return {"act": Tool("act", "Acts.", parameters, run)}


async def test_a_call_gives_json_with_non_ascii_kept_and_its_duration(bench: Bench) -> None:
    ticks = iter([10.0, 12.5])
    context = ToolContext(bench.sandbox, clock=lambda: next(ticks))
    outcome = await execute_call(tool_that({"text": "é✓"}), context, "act", "")
    assert outcome.content == '{"text":"é✓"}'
    assert (outcome.failed, outcome.kind, outcome.duration_s) == (False, "", 2.5)


async def test_the_word_error_in_a_result_is_no_failure(bench: Bench) -> None:
    outcome = await execute_call(tool_that({"error": "Error: error"}), bench.context, "act", "{}")
    assert not outcome.failed


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (ToolResult({"x": 1}, failed=True), "tool_error"),
        (ToolResult({"x": 1}, failed=True, timed_out=True), "timeout"),
    ],
)
async def test_a_tool_says_itself_that_it_failed(bench: Bench, result: ToolResult, kind: str) -> None:
    outcome = await execute_call(tool_that(result), bench.context, "act", "{}")
    assert (outcome.failed, outcome.kind, outcome.content) == (True, kind, '{"x":1}')


async def test_an_unknown_tool_is_answered_with_the_names_of_the_real_ones(bench: Bench) -> None:
    answer = await bench.call("terminl", command="true")
    assert answer.outcome.kind == "unknown_tool"
    assert answer.error == (
        "Tool 'terminl' does not exist. Available tools: terminal, process, read_file, write_file, patch, search_files"
    )


@pytest.mark.parametrize("arguments", ["{", "[]", '{"m": 1}', '{"n": "x"}'])
async def test_wrong_arguments_never_reach_the_tool(bench: Bench, arguments: str) -> None:
    outcome = await execute_call(tool_that(AssertionError("reached")), bench.context, "act", arguments)
    assert outcome.kind == "invalid_arguments"
    assert json.loads(outcome.content)["error"].startswith("Invalid arguments for act: ")


async def test_a_tool_error_is_its_message_and_details(bench: Bench) -> None:
    outcome = await execute_call(tool_that(ToolError("no such file", similar=["a"])), bench.context, "act", "{}")
    assert (outcome.kind, outcome.content) == ("tool_error", '{"error":"no such file","similar":["a"]}')


async def test_a_defect_in_a_tool_is_a_result_and_its_traceback_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        outcome = await execute_call(tool_that(KeyError("x")), bench.context, "act", "{}")
    assert (outcome.kind, outcome.content) == ("crash", '{"error":"KeyError: \'x\'"}')
    assert caplog.records[0].exc_info is not None
    assert "act" in caplog.text
    assert bench.sandbox.spec.label in caplog.text


@pytest.mark.parametrize("raised", [SandboxError("gone"), asyncio.CancelledError(), KeyboardInterrupt()])
async def test_a_lost_sandbox_and_cancellation_pass(bench: Bench, raised: BaseException) -> None:
    with pytest.raises(type(raised)):
        await execute_call(tool_that(raised), bench.context, "act", "{}")


async def test_a_tool_of_a_closed_sandbox_ends_the_sample(bench: Bench) -> None:
    await bench.sandbox.close()
    with pytest.raises(SandboxError):
        await bench.call("terminal", command="true")


@pytest.mark.parametrize("text", ["x", '"\\\n', "\0", "é"])
def test_a_result_too_long_is_cut_and_says_so(text: str) -> None:
    encoded = encode_result({"output": text * 200_000})
    assert len(encoded) <= MAX_RESULT_CHARS
    assert "ask for a smaller part" in json.loads(encoded)["notice"]


async def test_what_is_cut_is_masked_before(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-of-the-runner-1"
    monkeypatch.setattr("toolsets.text._mask", lambda text: text.replace(secret, "***"))
    outcome = await execute_call(tool_that({}), bench.context, "n" * 90 + secret, "{}")
    assert secret[:6] not in outcome.content
    for size in range(MAX_RESULT_CHARS // 2 - 40, MAX_RESULT_CHARS // 2):
        encoded = encode_result({"output": "x" * size + secret + "x" * MAX_RESULT_CHARS})
        assert secret[:4] not in encoded
    for kept in range(90, 110):
        cut = cut_middle("x" * 30 + secret + "x" * 300 + secret + "x" * 30, "", 0, kept)
        assert not any(part in cut for part in (secret[:6], secret[-6:]))


def test_what_json_cannot_hold_is_replaced() -> None:
    encoded = encode_result({"a": "x\ud800y", "b": b"\xff", "c": 2**70, "d": {1}, 5: ("t",), "e": Bench})
    decoded = json.loads(encoded)
    assert decoded["a"] == "x\ufffdy"
    assert decoded["b"] == "\ufffd"
    assert decoded["c"] == str(2**70)
    assert decoded["d"] == [1]
    assert decoded["5"] == ["t"]
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"d": deep}
    assert json.loads(encode_result(deep))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=[])),
        st.text(st.characters(exclude_categories=[])) | st.integers() | st.floats() | st.none() | st.binary(),
    )
)
def test_any_content_encodes_to_utf_8_json(content: dict[str, Any]) -> None:
    encoded = encode_result(content)
    encoded.encode()
    assert isinstance(json.loads(encoded), dict)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b(Ba\x1b=b\x1bM", "ab"),
        ("\x1bPdata\x1b\\x", "x"),
        ("\x9b1mx", "x"),
        ("plain [31m", "plain [31m"),
    ],
)
def test_escape_sequences_are_removed(raw: str, clean: str) -> None:
    assert strip_escapes(raw) == clean


@pytest.mark.parametrize("piece", ["\x1b]", "\x1bP", "\x1b[", "\x1b", "\x9b0"])
def test_escape_sequences_without_end_take_no_longer_than_others(piece: str) -> None:
    assert grows_with_length(strip_escapes, piece * 75_000, piece * 300_000)


@settings(deadline=None)
@given(st.text(max_size=50), st.text(max_size=50), st.integers(0, 9), st.integers(1, 40))
def test_cutting_the_middle_keeps_both_ends_and_counts_what_is_gone(
    head: str, tail: str, omitted: int, max_chars: int
) -> None:
    tail = tail if omitted else ""
    cut = cut_middle(head, tail, omitted, max_chars)
    if not omitted and len(head) <= max_chars:
        assert cut == head
        return
    notice = "\n\n... [OUTPUT TRUNCATED - "
    start, _, rest = cut.rpartition(notice)
    end = rest.partition(" total] ...\n\n")[2]
    assert head.startswith(start)
    assert (tail or head).endswith(end) or omitted
    assert len(start) + len(end) <= max_chars
    counted = int(rest.split(" ")[0])
    assert counted + len(start) + len(end) == len(head) + omitted + len(tail)
