"""Whatever an endpoint sends: no reply crashes a sample, freezes a process, or has a tool do what nobody asked for."""

import asyncio
import json
from datetime import datetime

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import example, given, settings

from promptmill.bodies import MAX_LEVELS, decode_body, no_json
from promptmill.client import encode_request
from promptmill.errors import LimitReachedError, Outcome
from promptmill.escaping import escaped, preview
from promptmill.exports.hermes import escaped_text, export_row, respaced, unescaped_text
from promptmill.exports.hermes_reader import read_back
from promptmill.exports.sharegpt import RowFacts, build_row, split_think, turn, unescaped_tags
from promptmill.joining import JoinedMessage
from promptmill.quirks.base import ModelRequest
from promptmill.reasoning import split_reasoning
from promptmill.records import AgentResult, Message, Sample, ToolCall
from promptmill.replies import error_in, is_empty, read_reply, refusal_reason
from promptmill.rows import has_reasoning
from promptmill.secrets import Mask
from promptmill.streaming import read_stream
from promptmill.verdicts import HttpFailure, verdict_on
from tests.fakes.model_server import Answer, by_turn, call, events, in_order, raw, say
from tests.fakes.streams import as_stream
from tests.rows import make_row
from tests.test_command import run_inline
from tests.toolbench import cpu_s, grows_with_length
from toolsets.base import ToolError
from toolsets.names import matching_tool
from toolsets.text import strip_escapes
from toolsets.tools.search import expand_braces
from toolsets.v4a import parse_patch

OFFERED = [{"type": "function", "function": {"name": name}} for name in ("terminal", "read_file")]
KEY = "sk-or-v1-0123456789abcdef0123456789abcdef0123456789abcdef"
MASK = Mask([KEY])
FACTS = RowFacts(0, "m", 0, ("terminal", "read_file"), datetime(2026, 1, 1))


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(text):
    message = {"content": text, "reasoning": text + "so", "reasoning_content": text[::2]}
    split_reasoning({"content": text})
    return read_reply({"choices": [{"message": message, "finish_reason": "stop"}]}, ModelRequest((), OFFERED))


def read_calls(text):
    message = {"content": text.strip(), "tool_calls": [{"id": "a", "function": {"name": text, "arguments": text}}]}
    read_reply({"choices": [{"message": {"content": message["content"]}}]}, ModelRequest((), OFFERED))
    return read_reply({"choices": [{"message": message}]}, ModelRequest((), OFFERED))


def save(text):
    split_think(text)
    unescaped_tags(text)
    has_reasoning(text)
    return split_think(turn(Message("assistant", text, text))["value"])


def to_hermes_and_back(text):
    entry = {"id": "a", "function": {"name": text[:50], "arguments": text}}
    turns = [
        {"from": "gpt", "value": text, "tool_calls": [entry]},
        {"from": "tool", "value": text, "tool_call_id": "a"},
    ]
    exported = export_row(make_row(conversations=turns))
    assert exported is not None
    return read_back(exported["conversations"])


SYSTEM = export_row(make_row(conversations=[]))["conversations"]


def from_hermes(text):
    unescaped_text(escaped_text(text))
    for turns in (
        [{"from": "system", "value": text}],
        [*SYSTEM, {"from": "gpt", "value": f"<think>\n</think>{text}"}],
        [*SYSTEM, {"from": "tool", "value": text}],
    ):
        try:
            read_back(turns)
        except ValueError:
            continue
    try:
        respaced(text, ",", ":")
    except ValueError:
        return


def show(text):
    preview(f"says    {text}", 100)
    return escaped(strip_escapes(text))


def mask(text):
    return MASK.value({"a": text, "b": [f"[{text}"]})


def take_as_arguments(text):
    matching_tool(text, ("terminal",))
    expand_braces(text)
    try:
        parse_patch(f"*** Begin Patch\n*** Add File: a{text}\n{text}\n*** End Patch")
    except ToolError:
        return


def join(text):
    """Pieces, each in every field that grows."""
    joined = JoinedMessage()
    for number, start in enumerate(range(0, len(text), 400)):
        piece = text[start : start + 400]
        function = {"name": "t", "arguments": piece}
        joined.add(
            {
                "content": [{"type": "thinking", "thinking": [{"type": "text", "text": piece}]}],
                "reasoning": piece,
                "function_call": {"arguments": piece},
                "annotations": [piece],
                "reasoning_details": [
                    {"type": "reasoning.text", "text": piece, "index": 0},
                    {"type": "reasoning.text", "text": piece, "index": number},
                ],
                "thinking_blocks": [{"type": "thinking", "thinking": piece}],
                "tool_calls": [
                    {"index": 0, "id": "a", "function": function},
                    {"index": number, "id": str(number), "function": function},
                ],
            }
        )
    return joined.message()


def judge(text):
    return verdict_on(HttpFailure(400, {"error": {"message": text, "code": text}}, text, sent=text.encode()))


READERS = {
    "reasoning and text": read, "calls": read_calls, "saving": save, "hermes": to_hermes_and_back,
    "reading hermes": from_hermes, "showing": show, "masking": mask, "a tool": take_as_arguments, "joining": join,
    "no JSON": lambda text: (no_json(text.encode()), no_json(f"<html>{text}".encode())), "a failure": judge,
}  # fmt: skip
UNITS = [
    "<think>", "</think>", "<think></think>", "<think>a</thinking>", "<think><think>a</think>", "a</think>", "[THINK]",
    "\n", "`", "```\n", "<", "&", "&amp;", "&amp;lt;/think>", "\\", '\\"', '"', "{", "[", "}", '{"a":', "<tool_call>",
    "<tool_call>{}</tool_call>", '<tool_call>{"name":"terminal"}</tool_call>', '<tool_call>{"name":"</tool_call>',
    "<tool_call><function=terminal></tool_call>", "<parameter=a>", "<tool_call><function=a><parameter=b>c</parameter>",
    "<tools>\n[]\n</tools>\n", '\n<tool_call>\n{"name": "', '\n<tool_response>\n{"tool_call_id": "', "\x1b[", "\x1b[0",
    " ", "\\n", "model ", '"name" ', "<script ", "{,", ",", KEY, KEY[:20], KEY[-12:],
]  # fmt: skip
BEGINNINGS = ["", "```json", "<tool_call><function=terminal>", '<tool_call>{"name": "terminal", "a": "']


@pytest.mark.parametrize("reader", READERS)
def test_no_text_takes_more_than_its_length_to_read(reader):
    for number, unit in enumerate(UNITS):
        begin = BEGINNINGS[number % len(BEGINNINGS)]
        for beginning in {"", begin} if reader in ("calls", "reasoning and text", "a tool") else {begin}:
            small, large = (f"{beginning}{unit * (size // len(unit))}x" for size in (50_000, 200_000))
            assert grows_with_length(READERS[reader], small, large), (beginning, unit)


def test_what_froze_a_process_is_read_at_once():
    assert cpu_s(read, "```json" + "\n" * 200_000 + "x") < 1
    assert cpu_s(read_calls, "<tool_call><function=terminal>" + "<parameter=a>" * 20_000) < 1


def test_many_calls_are_read_in_time():
    calls = [{"id": f"a{number}", "function": {"name": "terminal"}} for number in range(30_000)]
    assert cpu_s(lambda entries: read_reply({"choices": [{"message": {"tool_calls": entries}}]}), calls) < 5


# ── what is odd ───────────────────────────────────────────────────────────────────────────────────────────────────────

SAID = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<thinking>", "</thinking>", "[THINK]", "<tool_call>", "</tool_call>", "```json\n",
         "\n```", '{"name": "terminal", "arguments": {"command": "ls"}}', '{"name": "nope", "arguments": {}}', "{}",
         "[]", "\n", "<function=terminal>", "<parameter=command>\nls\n</parameter>", "</function>", "\ud83d", "😀",
         "\x00", "why ", "so", "&lt;think>", " ", "`"]
    ),
    max_size=6,
).map("".join)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), SAID, st.sampled_from([0, -1, 1.5, 1e308, 2**63, 10**30, 10**400, float("nan"), "12"]),
    st.just([]), st.just({}), st.just({"type": ["text"], "text": "hi"}), st.just([[[[]]]]), st.just({"type": []}),
    st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "thinking", []]), "text": SAID}), max_size=2),
    st.lists(st.fixed_dictionaries({"type": st.just("thinking"), "thinking": SAID}), max_size=2),
)  # fmt: skip
PARTS = st.lists(
    st.fixed_dictionaries(
        {}, optional={name: SAID | ODD for name in ("type", "text", "thinking", "signature", "index")}
    ),
    max_size=2,
)
FUNCTIONS = st.fixed_dictionaries(
    {}, optional={"name": st.sampled_from(["terminal", "Terminal", "nope", ""]) | ODD, "arguments": SAID | ODD,
                  "parameters": ODD, "input": ODD}
)  # fmt: skip
ENTRIES = st.fixed_dictionaries(
    {}, optional={"id": st.sampled_from(["a", "b", ""]) | ODD, "function": FUNCTIONS | ODD, "name": ODD,
                  "arguments": ODD, "type": ODD, "extra_content": ODD}
)  # fmt: skip
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "cost", "prompt_tokens_details",
          "completion_tokens_details", "cost_details", "is_byok")  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {"content": SAID | PARTS | ODD},
    optional={name: SAID | ODD for name in ("reasoning", "reasoning_content", "thinking", "refusal")}
    | {name: PARTS | ODD for name in ("reasoning_details", "thinking_blocks")}
    | {"tool_calls": st.lists(ENTRIES | ODD, max_size=3) | ODD, "function_call": FUNCTIONS | ODD},
)
BODIES = st.fixed_dictionaries(
    {"choices": st.tuples(st.fixed_dictionaries(
        {"message": MESSAGES}, optional={"finish_reason": st.sampled_from(["stop", "length", "content_filter"]) | ODD,
                                         "error": ODD})).map(list)},
    optional={"usage": st.fixed_dictionaries({}, optional=dict.fromkeys(COUNTS, ODD)) | ODD, "error": ODD,
              "object": ODD},
)  # fmt: skip


def encoded(body):
    try:
        return orjson.dumps(body)
    except TypeError:
        # Python spells what orjson does not: half a surrogate pair, integers of any size, numbers that are none.
        return json.dumps(body).encode()


def checked(body):
    """What is made of a body, saved, sent back and exported; None where it is no reply."""
    error_in(body)
    try:
        reply = read_reply(body, ModelRequest([Message("user", "go")], OFFERED, {"max_tokens": 12}))
    except ValueError:
        return None
    refusal_reason(reply)
    is_empty(reply)
    message = reply.message
    results = [Message("tool", "{}", tool_call_id=call.id, name=call.name) for call in message.tool_calls]
    messages = [Message("user", "go"), message, *results]
    encode_request(ModelRequest(messages, OFFERED))
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    result = AgentResult(Outcome.COMPLETED, "answer", messages, usage=reply.usage, tool_schemas=tuple(OFFERED))
    row = orjson.loads(orjson.dumps(build_row(result, Sample(0, "go", "0" * 32), FACTS)))
    assert split_think(row["conversations"][1]["value"]) == (message.reasoning, message.content)
    exported = export_row(row)
    assert exported is not None
    read = read_back(exported["conversations"]).messages
    assert [(m.content, m.reasoning) for m in read] == [(m.content, m.reasoning) for m in messages]
    assert row["usage"]["cost_usd"] is not None
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.content, message.reasoning, calls, reply.cut, reply.finish_reason, reply.usage


async def streamed(data):
    async def pieces():
        for start in range(0, len(data), 100):
            yield data[start : start + 100]

    return await read_stream(pieces())


def joined(data):
    """A stream's body; None where it is no reply."""
    try:
        return checked(asyncio.run(streamed(data)))
    except ValueError:
        return None


def both_ways(data):
    """What is made of a body, sent whole and streamed."""
    try:
        value = decode_body(data)
    except ValueError:
        return
    checked(value)
    try:
        stream = as_stream(value)
    except (TypeError, AttributeError):  # nothing that could be cut, or encoded, by the tests' own server
        stream = b"data: " + data + b"\n\n"
    joined(stream)
    joined(b"data: " + data.replace(b'"message"', b'"delta"') + b"\n\ndata: [DONE]\n\n")


@settings(max_examples=300, deadline=None)
@given(BODIES)
@example({"choices": [{"message": {"content": [{"type": ["text"], "text": "hi"}]}}]})
@example({"choices": [{"message": {"content": "hi", "reasoning": {"type": []}}}]})
@example({"choices": [{"message": {"content": "hi", "reasoning_details": [{"index": 10**30}], "x": float("nan")}}]})
@example({"choices": [{"message": {"content": "hi"}}], "usage": {"cost": 10**400, "completion_tokens": 10**400}})
def test_no_body_has_anything_but_a_reply_or_a_broken_one_made_of_it(body):
    both_ways(encoded(body))


@pytest.mark.parametrize("levels", [90, 200, 300, MAX_LEVELS, 900, 100_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"choices":[{"message":{"content":"hi","reasoning_details":%s}}]}',
        '{"choices":[{"message":{"content":"\\ud83d","x":%s}}]}',
        '{"choices":[{"message":{"content":%s}}],"x":NaN}',
        '{"choices":[{"message":{"content":"hi"},"finish_reason":%s}]}',
        '{"choices":[{"message":{"content":"hi"}}],"usage":%s}',
        '{"choices":[{"message":{"content":"hi"},"error":%s}]}',
        '{"error":{"message":%s}}',
        '{"object":"error","message":%s}',
        '{"choices":[{"message":{"reasoning_content":%s,"function_call":{"name":"t","arguments":%s}}}]}',
        '{"choices":[{"message":{"tool_calls":[{"id":%s,"function":{"name":%s}}]}}]}',
        '{"choices":[{"message":{"tool_calls":[{"function":{"name":"t","arguments":%s}}]}}]}',
        '{"choices":[{"message":{"tool_calls":[{"function":{"name":"t"},"extra_content":%s}]}}]}',
    ],
)
def test_no_depth_is_too_much(body, levels):
    for inner in ("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels):
        both_ways(body.replace("%s", inner).encode())


@pytest.mark.parametrize("levels", [90, 300, 900, 100_000])
def test_no_depth_of_what_a_model_writes_is_too_much(levels):
    inner = '{"a":' * levels + "1" + "}" * levels
    for text in (inner, inner + "}", inner.replace("1", '"\\ud800"'), "[" * levels):
        checked(
            {"choices": [{"message": {"content": f'<tool_call>{{"name":"terminal","arguments":{text}}}</tool_call>'}}]}
        )
        checked({"choices": [{"message": {"content": f'{{"name":"terminal","arguments":{text}}}'}}]})
        checked({"choices": [{"message": {"tool_calls": [{"function": {"name": "terminal", "arguments": text}}]}}]})


@pytest.mark.parametrize("levels", [MAX_LEVELS, 900])
@pytest.mark.parametrize("name", ["reasoning_details", "function_call", "x"])
def test_a_reply_that_is_nested_too_deeply_is_a_broken_one(name, levels):
    for kind in ("message", "delta"):
        inner = ('{"a":' * levels + "1" + "}" * levels).encode()
        body = b'{"choices":[{"%s":{"content":"hi","%s":[%s]}}]}' % (kind.encode(), name.encode(), inner)
        with pytest.raises(ValueError, match="levels deep"):
            read_reply(decode_body(body) if kind == "message" else asyncio.run(streamed(b"data: " + body + b"\n\n")))


# ── both transports ───────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = st.sampled_from(["terminal", "read_file", "nope"])
OBJECTS = st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["", "}{", '"', "\\", 1, None, {"c": []}]))
ARGUMENTS = st.one_of(
    OBJECTS, OBJECTS.map(lambda value: orjson.dumps(value).decode()), st.sampled_from(["", "[1]", "{"])
)


@st.composite
def calls_and_deltas(draw):
    """Calls of a message, and the same calls cut into the pieces of a stream."""
    has_places = draw(st.booleans())
    entries, pieces = [], []
    for number in range(draw(st.integers(1, 4))):
        name = draw(NAMES | st.just("") if has_places else NAMES)
        call_id = draw(st.sampled_from([f"c{number}", None, ""] + (["same"] if has_places else [])))
        arguments = draw(ARGUMENTS)
        entries.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        place = {"index": number} if has_places else {}
        size = draw(st.integers(1, 9))
        texts = (
            [arguments[at : at + size] for at in range(0, len(arguments), size)] if isinstance(arguments, str) else []
        )
        begins_whole = not texts or draw(st.booleans())
        first = {**entries[-1], **place, "function": {"name": name, "arguments": (texts or [arguments])[0]}}
        if not begins_whole:
            first["function"] = {"name": name, "arguments": ""}
        pieces.append(first)
        repeats_id = {"id": call_id} if call_id and draw(st.booleans()) else {}
        for text in texts[begins_whole:]:
            pieces.append({**place, **repeats_id, "function": {"arguments": text}})
    cuts = sorted(draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    return entries, [pieces[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]


@settings(max_examples=300, deadline=None)
@given(calls_and_deltas(), SAID.filter(lambda text: "\ud83d" not in text))
def test_a_message_has_the_same_calls_however_it_is_sent(drawn, content):
    entries, groups = drawn
    message = JoinedMessage()
    for group in groups:
        message.add({"tool_calls": group})
    for start in range(0, len(content), 3):
        message.add({"content": content[start : start + 3]})
    whole, again = (
        checked({"choices": [{"message": made, "finish_reason": "stop"}]})
        for made in ({"content": content, "tool_calls": entries}, message.message())
    )
    assert whole == again


@settings(max_examples=200, deadline=None)
@given(MESSAGES.filter(lambda message: not isinstance(message.get("tool_calls"), list)))
def test_a_message_is_read_alike_in_both_transports(message):
    body = decode_body(encoded({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))
    try:
        stream = as_stream(body)
    except TypeError:  # a number that the tests' own server cannot write
        return
    assert joined(stream) == checked(body)


# ── what comes of it ──────────────────────────────────────────────────────────────────────────────────────────────────

DONE = say("done", reasoning="r")


async def held(start_server, script, **given):
    server = await start_server(script)
    run = await run_inline(server.base_url, ["go"], sandbox="local", distribution="terminal_only", **given)
    (row,) = [*(run.path / "batch_0.jsonl").read_bytes().splitlines(), *run.lines("failed.jsonl")]
    return run, orjson.loads(row) if isinstance(row, bytes) else row, server


def text_call(name, arguments='{"command": "echo 42"}', end="}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}{end}\n</tool_call>'


async def test_a_call_in_tags_of_a_tool_that_there_is_not_is_told_so_and_its_row_left_out(start_server):
    run, row, server = await held(start_server, by_turn(say(text_call("web_search"), reasoning="r"), DONE))
    assert (row["unknown_tools"], row["outcome"], server.count) == (["web_search"], "completed", 2)
    (result,) = [turn["value"] for turn in row["conversations"] if turn["from"] == "tool"]
    assert "Available tools: terminal" in orjson.loads(result)["error"]
    assert run.rows == []


async def test_a_broken_call_in_tags_is_told_so_and_may_be_mended(start_server):
    script = by_turn(say(text_call("terminal", end=""), reasoning="r"), say(text_call("terminal")), DONE)
    run, row, _ = await held(start_server, script)
    broken, mended = (orjson.loads(turn["value"]) for turn in row["conversations"] if turn["from"] == "tool")
    assert "not valid JSON" in broken["error"]
    assert mended["output"] == "42"
    assert len(run.rows) == 1


async def test_a_model_that_only_writes_broken_calls_is_ended(start_server):
    _, row, server = await held(start_server, lambda request: say(text_call("terminal", end=""), reasoning="r"))
    assert (row["outcome"], row["stop_reason"], server.count) == ("partial", "no_valid_call", 3)


@pytest.mark.parametrize("tokens", [64, 64.0, "64"])
async def test_a_call_at_the_token_limit_is_held_back_however_the_tokens_are_written(start_server, tokens, tmp_path):
    for name in ("completion_tokens", "output_tokens"):
        command = {"command": f"touch {tmp_path}/executed"}
        script = by_turn(call("terminal", command, reasoning="r", usage={name: tokens}), DONE)
        _, row, _ = await held(start_server, script, max_tokens=64, run_name=f"run_{name}")
        assert row["stop_reason"] == "output_cut"
        assert not (tmp_path / "executed").exists()


def delta(**function):
    place = {name: function.pop(name) for name in ("index", "id")}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{**place, "function": function}]}}]}


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_nameless_call_of_a_stream_takes_over_no_other(start_server, tmp_path, as_text):
    wrong = {"command": f"touch {tmp_path}/wrong"}
    script = by_turn(
        events(
            delta(index=0, id="c1", name="terminal", arguments='{"command":"echo first"}'),
            delta(index=1, id="c2", name="", arguments=orjson.dumps(wrong).decode() if as_text else wrong),
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        ),
        DONE,
    )
    _, row, _ = await held(start_server, script, stream=True)
    first, second = (orjson.loads(turn["value"]) for turn in row["conversations"] if turn["from"] == "tool")
    assert first["output"] == "first"
    assert "does not exist" in second["error"]
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": -5, "completion_tokens": -5}, {"prompt_tokens": "many"}])
async def test_a_limit_that_no_count_can_keep_is_said_to_be_none(start_server, usage):
    server = await start_server(lambda request: say("so", reasoning="r", usage=usage))
    given = {"max_total_tokens": 2000, "num_workers": 1, "sandbox": "local"}
    with pytest.raises(LimitReachedError, match="--max_total_tokens=2000 cannot be kept: .* does not report tokens"):
        await run_inline(server.base_url, ["a", "b", "c"], **given)
    assert server.count == 1


@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": 1000.0, "completion_tokens": 100.0}, {"prompt_tokens": "1000", "completion_tokens": "100"},
     {"input_tokens": 1000, "output_tokens": 100}, {"total_tokens": 1100}],
)  # fmt: skip
async def test_a_limit_is_kept_however_the_tokens_are_counted(start_server, usage):
    server = await start_server(lambda request: say("so", reasoning="r", usage=usage))
    given = {"max_total_tokens": 2500, "num_workers": 1, "sandbox": "local"}
    with pytest.raises(LimitReachedError, match="--max_total_tokens=2500 is reached: 2,200 tokens"):
        await run_inline(server.base_url, ["a", "b", "c", "d"], **given)
    assert server.count == 2


async def test_costs_that_are_nonsense_are_no_cost(start_server):
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost": 1.7e308}
    script = by_turn(call("terminal", {"command": "true"}, reasoning="r", usage=usage), say("so", usage=usage))
    _, row, _ = await held(start_server, script)
    assert (row["usage"]["cost_usd"], row["usage"]["priced_calls"], row["usage"]["reported_calls"]) == (0.0, 0, 2)


def body(**message) -> Answer:
    return raw(orjson.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))


DEEP_ARGUMENTS = b'{"a":' * 300 + b"1" + b"}" * 300
DEEP_CALL = (
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"terminal","arguments":'
    + DEEP_ARGUMENTS + b'}}]},"finish_reason":"tool_calls"}]}\n\n'
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (body(content=[{"type": ["text"], "text": "hi"}], reasoning="r"), False),
        (body(content="hi", reasoning={"type": []}), False),
        (
            raw(b'{"choices":[{"message":{"content":"hi","reasoning_details":' + b"[" * 300 + b"]" * 300 + b"}}]}"),
            False,
        ),
        (raw(b'{"choices":[{"message":{"content":"\\ud800","x":' + b"[" * 900 + b"]" * 900 + b"}}]}"), False),
        (raw(b'{"choices":[{"message":{"content":"hi"}}],"x":NaN,"usage":{"cost":1' + b"0" * 400 + b"}}"), False),
        (events(DEEP_CALL, done=False), True),
        (raw(b'{"error":{"message":' + b"[" * 1010 + b"]" * 1010 + b"}}", status=500), False),
    ],
)
async def test_no_odd_reply_crashes_its_sample(start_server, answer, stream):
    server = await start_server(in_order(answer, DONE))
    given = {"sandbox": "local", "stream": stream, "keep_no_reasoning": True}
    run = await run_inline(server.base_url, ["go"], **given)
    assert run.row["stop_reason"] == "answer"


def test_a_secret_is_masked_at_any_depth():
    mask = Mask(["1234567890123456"])
    for levels in (300, 900):
        text = '{"a":' * levels + "1234567890123456" + "}" * levels
        assert "1234567890123456" not in mask.value({"x": text})["x"]


def test_a_call_is_never_saved_as_what_cannot_be_read():
    for arguments in ("{" * 5000, '{"a": ' * 5000, '"' * 5000, "\\" * 5000):
        saved = ToolCall("a", "terminal", arguments).as_openai()["function"]["arguments"]
        assert orjson.loads(saved) == {"invalid_arguments": arguments}
