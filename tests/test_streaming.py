"""Joining a stream: the same body as without one, however a server cuts it, and never half a reply for a whole one."""

import asyncio
import time

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given

from promptmill.replies import error_in, read_reply
from promptmill.streaming import StreamCutError, read_stream, stream_fields
from tests.fakes.streams import DONE, as_stream, event
from tests.rows import make_settings
from tests.test_replies import MESSAGES

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def body_of(message, finish_reason="stop", **fields):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE, **fields}


async def cut(data, size=None):
    size = size or max(1, len(data))
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def joined(data, size=None):
    return await read_stream(cut(data, size))


def chunk(delta=None, finish_reason=None, **fields):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish_reason}], **fields}


def stream_of(*deltas, finish_reason="stop"):
    return b"".join(event(chunk(delta)) for delta in deltas) + event(chunk({}, finish_reason)) + DONE


async def message_of(*deltas):
    return (await joined(stream_of(*deltas)))["choices"][0]["message"]


# ── the same as without ───────────────────────────────────────────────────────────────────────────────────

WHOLE = {
    "text": {"content": "so"},
    "long text": {"content": "wörds 🎉 of many bytes, " * 9},
    "text and reasoning": {"content": "so", "reasoning": "why and why again"},
    "reasoning_content": {"content": "so", "reasoning_content": "why\n\nand why again"},
    "both fields": {"content": "so", "reasoning": "why", "reasoning_content": "why"},
    "only details": {
        "content": "so",
        "reasoning_details": [
            {"type": "reasoning.text", "text": "why and why again", "signature": "sig", "format": "f", "index": 0},
            {"type": "reasoning.summary", "summary": "in short, because", "index": 1},
            {"type": "reasoning.encrypted", "data": "AAAA", "id": "r1", "index": 2},
        ],
    },
    "parts": {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "why"}], "signature": "s"},
            {"type": "text", "text": "so"},
        ]
    },
    "refusal": {"content": None, "refusal": "I will not say."},
    "no content": {"content": None},
    "empty content": {"content": ""},
    "a call": {
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "t", "arguments": '{"a":  "é 🎉"}'}}],
    },
    "two calls and text": {
        "content": "I look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}},
        ],
    },
    "a call with something of Google's": {
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"},
             "extra_content": {"google": {"thought_signature": "sig"}}},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 64, None])
@pytest.mark.parametrize("message", WHOLE.values(), ids=WHOLE)
async def test_a_stream_is_joined_to_the_body_without_it(message, size):
    body = body_of(message)
    assert await joined(as_stream(body), size) == body


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, None])
async def test_every_line_end_is_read(line_end, size):
    body = body_of(WHOLE["two calls and text"])
    assert await joined(as_stream(body).replace(b"\n", line_end), size) == body


@pytest.mark.parametrize("message", MESSAGES)
async def test_every_kind_of_message_is_read_alike_in_both_transports(message):
    body = body_of(message)
    streamed, whole = read_reply(await joined(as_stream(body), 11)), read_reply(body)
    assert (streamed.message.reasoning, streamed.message.content) == (whole.message.reasoning, whole.message.content)
    assert streamed.refusal == whole.refusal
    assert streamed.usage == whole.usage


@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=1, max_size=40), st.integers(1, 50))
def test_any_text_comes_through_any_cut(content, reasoning, argument, size):
    function = {"name": "t", "arguments": orjson.dumps({"a": argument}).decode()}
    calls = [{"id": "a", "type": "function", "function": function}]
    body = body_of({"content": content, "reasoning": reasoning or "r", "tool_calls": calls})
    assert asyncio.run(joined(as_stream(body), size)) == body


# ── how servers cut ───────────────────────────────────────────────────────────────────────────────────────


def piece(arguments=None, *, name=None, **fields):
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}


ONE = [("t", '{"a": 1}')]
TWO = [("t", '{"a": 1}'), ("u", '{"b": 2}')]
CALL_PIECES = {
    "as OpenAI": (
        [piece("", name="t", index=0, id="a"), piece('{"a"', index=0), piece(": 1}", index=0)], ONE
    ),
    "id and name in each piece": (
        [piece('{"a"', name="t", index=0, id="a"), piece(": 1}", name="t", index=0, id="a")], ONE
    ),
    "a new id in each piece": (
        [piece("", name="t", index=0, id="a"), piece('{"a"', index=0, id="b"), piece(": 1}", index=0, id="c")], ONE
    ),
    "a new id in each piece and no index": (
        [piece("", name="t", id="a"), piece('{"a"', id="b"), piece(": 1}", id="c")], ONE
    ),
    "no index": ([piece('{"a"', name="t", id="a"), piece(": 1}")], ONE),
    "no index and no id": ([piece('{"a"', name="t"), piece(": 1}")], ONE),
    "a whole call in one piece": ([piece('{"a": 1}', name="t", index=0, id="a")], ONE),
    "arguments as an object": ([piece({"a": 1}, name="t", index=0, id="a")], [("t", {"a": 1})]),
    "arguments as an object after the name": (
        [piece(name="t", index=0, id="a"), piece({"a": 1}, index=0)], [("t", {"a": 1})]
    ),
    "an empty object before the text": (
        [piece({}, name="t", index=0, id="a"), piece('{"a"', index=0), piece(": 1}", index=0)], ONE
    ),
    "the arguments before the name": ([piece('{"a"', index=0, id="a"), piece(": 1}", name="t", index=0)], ONE),
    "a second call without a name": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece({"b": 2}, name="", index=1, id="b")],
        [ONE[0], ("", {"b": 2})]
    ),
    "a second call without a name, as text and in pieces": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece("", name="", index=1, id="b"), piece('{"b"', index=1),
         piece(": 2}", index=1)], [ONE[0], ("", '{"b": 2}')]
    ),
    "a second call without a name, at the first one's place": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece('{"b": 2}', name="", index=0, id="b")],
        [ONE[0], ("", '{"b": 2}')]
    ),
    "a second call without a name and without a place": (
        [piece('{"a": 1}', name="t", id="a"), piece('{"b": 2}', name="", id="b")], [ONE[0], ("", '{"b": 2}')]
    ),
    "a second call without anything but an object": (
        [piece({"a": 1}, name="t", index=0), piece({"b": 2}, index=0)], [("t", {"a": 1}), ("", {"b": 2})]
    ),
    "a second call without a name and with the first one's id": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece('{"b": 2}', index=1, id="a")],
        [ONE[0], ("", '{"b": 2}')]
    ),
    "an object that grows": (
        [piece({"a": 1}, name="t", index=0, id="a"), piece({"a": 1, "b": 2}, index=0, id="a")],
        [("t", {"a": 1, "b": 2})]
    ),
    "braces and quotes within the text": (
        [piece('{"a": "}{\\', name="t", index=0, id="a"), piece('"}', name="t", index=0, id="a"),
         piece('{}"}', name="t", index=0, id="a")], [("t", '{"a": "}{\\"}{}"}')]
    ),
    "under another name": (
        [{"index": 0, "id": "a", "function": {"name": "t", "parameters": '{"a"'}},
         {"index": 0, "function": {"parameters": ": 1}"}}], ONE
    ),
    "a piece that is no call": ([piece('{"a": 1}', name="t", index=0), {"index": 1, "id": "b"}], ONE),
    "the name in pieces": (
        [piece(name="te", index=0, id="a"), piece(name="rm", index=0), piece("{}", index=0)], [("term", "{}")]
    ),
    "the whole call once more at the end": (
        [piece('{"a"', name="t", index=0, id="a"), piece(": 1}", index=0),
         piece('{"a": 1}', name="t", index=0, id="a")], ONE
    ),
    "two calls, all at place 0": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece('{"b": 2}', name="u", index=0, id="b")], TWO
    ),
    "two calls, all at place 0 and without ids": (
        [piece('{"a": 1}', name="t", index=0), piece('{"b": 2}', name="u", index=0)], TWO
    ),
    "two calls with one id": (
        [piece('{"a": 1}', name="t", index=0, id="a"), piece('{"b": 2}', name="u", index=1, id="a")], TWO
    ),
    "two calls with one id and no index": (
        [piece('{"a": 1}', name="t", id="a"), piece('{"b": 2}', name="u", id="a")], TWO
    ),
    "two calls without ids": (
        [piece("", name="t", index=0), piece('{"a": 1}', index=0), piece("", name="u", index=1),
         piece('{"b": 2}', index=1)], TWO
    ),
    "two calls, pieces alternating": (
        [piece("", name="t", index=0, id="a"), piece("", name="u", index=1, id="b"), piece('{"a"', index=0),
         piece('{"b"', index=1), piece(": 1}", index=0), piece(": 2}", index=1)], TWO
    ),
    "two calls, no index, told apart by ids": (
        [piece("", name="t", id="a"), piece("", name="u", id="b"), piece('{"b": 2}', id="b"),
         piece('{"a": 1}', id="a")], TWO
    ),
    "places from 1 on": ([piece('{"a": 1}', name="t", index=1), piece('{"b": 2}', name="u", index=2)], TWO),
    "the id before the name": ([{"index": 0, "id": "a"}, piece('{"a": 1}', name="t", index=0)], ONE),
    "null everywhere": (
        [piece(name="t", index=0, id="a"), {"index": 0, "id": None, "function": {"name": None, "arguments": None}},
         piece('{"a": 1}', index=0)], ONE
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pieces", "expected"), CALL_PIECES.values(), ids=CALL_PIECES)
@pytest.mark.parametrize("together", [False, True])
async def test_tool_calls_are_joined_however_they_are_cut(pieces, expected, together):
    grouped = [pieces] if together else [[one] for one in pieces]
    message = await message_of(*({"tool_calls": group} for group in grouped))
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(function["name"], function["arguments"]) for function in functions] == expected
    calls = read_reply(body_of(message)).message.tool_calls
    assert len({call.id for call in calls}) == len(expected)


async def test_a_call_that_is_no_list_or_has_no_function_is_read_too():
    message = await message_of({"tool_calls": {"id": "a", "name": "t", "arguments": "{}"}})
    assert message["tool_calls"][0]["function"] == {"name": "t", "arguments": "{}"}


async def test_a_legacy_call_is_joined():
    message = await message_of(
        {"function_call": {"name": "t", "arguments": '{"a"'}}, {"function_call": {"arguments": ":1}"}}
    )
    assert message["function_call"] == {"name": "t", "arguments": '{"a":1}'}


async def test_details_without_an_index_are_told_apart_by_their_type_and_signature():
    details = [
        {"type": "reasoning.text", "text": "a"}, {"type": "reasoning.text", "text": "b"},
        {"type": "reasoning.text", "signature": "s"}, {"type": "reasoning.text", "text": "c"},
        {"type": "reasoning.encrypted", "data": "X"}, {"type": "reasoning.encrypted", "data": "Y"},
    ]  # fmt: skip
    message = await message_of(*({"reasoning_details": [detail]} for detail in details))
    assert message["reasoning_details"] == [
        {"type": "reasoning.text", "text": "ab", "signature": "s"},
        {"type": "reasoning.text", "text": "c"},
        {"type": "reasoning.encrypted", "data": "X"},
        {"type": "reasoning.encrypted", "data": "Y"},
    ]


async def test_blocks_of_thinking_are_joined_until_they_are_signed():
    pieces = ({"thinking": "wh"}, {"thinking": "y"}, {"thinking": "", "signature": "s"}, {"thinking": "and"})
    blocks = [{"type": "thinking", **piece} for piece in pieces]
    message = await message_of(*({"thinking_blocks": [block]} for block in blocks), {"content": "so"})
    assert message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "thinking", "thinking": "and"}
    ]  # fmt: skip
    together = [{"type": "thinking", "thinking": "why"}, {"type": "thinking", "thinking": "and"}]
    assert (await message_of({"thinking_blocks": together}))["thinking_blocks"] == together


async def test_parts_and_text_are_joined_in_order():
    message = await message_of(
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "wh"}]}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "y"}]}]},
        {"content": "s"},
        {"content": "o"},
    )
    assert message["content"] == [
        {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]},
        {"type": "text", "text": "so"},
    ]


async def test_halves_of_a_surrogate_pair_in_two_chunks_are_one_character():
    halves = (rb'{"content":"\ud83c"}}]}', rb'{"content":"\udf89 \ud83c"},"finish_reason":"stop"}]}')
    data = b"".join(b'data: {"choices":[{"index":0,"delta":' + half + b"\n\n" for half in halves)
    body = await joined(data + DONE, 5)
    assert body["choices"][0]["message"]["content"] == "🎉 �"


async def test_what_a_stream_has_around_its_chunks_is_passed_over():
    data = (
        b"\xef\xbb\xbf: OPENROUTER PROCESSING\n\nretry: 10\nid: 7\nevent: message\ndata:\n\ndata: null\n\ndata: [1]\n\n"
    )
    assert await joined(data + as_stream(body_of({"content": "so"}))) == body_of({"content": "so"})


async def test_an_event_of_several_lines_and_events_without_a_blank_line_between_them_are_read():
    first = b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "s"}}]}\n'
    second = b'data: {"choices": [{"index": 0, "delta": {"content": "o"}, "finish_reason": "stop"}]}\n'
    body = await joined(first + second + b"data: [DONE]")
    assert body["choices"][0]["message"]["content"] == "so"


async def test_an_event_of_many_long_lines_is_not_read_for_ever():
    data = b'data: {"a": [\n' + b"".join(b'data: "%s",\n' % (b"x" * 30_000) for _ in range(990))
    begun_s = time.process_time()
    with pytest.raises(ValueError, match="too many long lines"):
        await joined(data, 100_000)
    assert time.process_time() - begun_s < 5


async def test_other_choices_are_left_out():
    other = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}]}
    body = await joined(event(other) + as_stream(body_of({"content": "so"})))
    assert body["choices"][0]["message"]["content"] == "so"


async def test_the_last_usage_counts():
    data = event(chunk({"content": "s"}, usage={"completion_tokens": 1})) + event(chunk({}, "stop", usage=None))
    assert (await joined(data + event({"choices": [], "usage": USAGE}) + DONE))["usage"] == USAGE


async def test_a_message_that_is_sent_whole_is_read_and_not_twice():
    whole = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}]}
    assert (await joined(event(whole) + DONE))["choices"][0]["message"]["content"] == "so"
    data = event(chunk({"content": "s"})) + event(chunk({"content": "o"})) + event(whole)
    assert (await joined(data + DONE))["choices"][0]["message"]["content"] == "so"


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_missing_done_is_no_loss_when_the_reply_had_ended():
    data = as_stream(body_of(WHOLE["a call"])).removesuffix(DONE)
    assert await joined(data) == body_of(WHOLE["a call"])
    assert (await joined(data + b'data: {"choices": [], "usa'))["choices"] == body_of(WHOLE["a call"])["choices"]


@pytest.mark.parametrize("message", [WHOLE["long text"], WHOLE["only details"], WHOLE["two calls and text"]])
async def test_a_stream_that_breaks_off_is_no_reply_wherever_it_does(message):
    data = as_stream(body_of(message))
    finish = data.index(b'"finish_reason":"stop"')
    for end in range(0, data.rindex(b"data:", 0, finish), 13):
        with pytest.raises(ValueError, match="stream ended|empty body|no JSON"):
            await joined(data[:end], 50)


async def test_a_broken_off_stream_keeps_what_came():
    data = event(chunk({"content": "so"}, usage=USAGE)) + b"data: {"
    with pytest.raises(StreamCutError, match="ended within an event") as cut_off:
        await joined(data)
    assert cut_off.value.body["usage"] == USAGE
    assert cut_off.value.body["choices"][0]["message"]["content"] == "so"
    with pytest.raises(StreamCutError, match="before anything of the reply came"):
        await joined(b": keep-alive\n\n: keep-alive\n\n")


async def test_what_the_transport_raises_passes():
    async def broken():
        yield event(chunk({"content": "so"}))
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await read_stream(broken())


@pytest.mark.parametrize(
    "failure",
    [
        event({"error": {"message": "overloaded", "code": 502}}),
        event({"error": "overloaded"}),
        event({"error": {"message": "overloaded"}, "choices": [{"index": 0, "delta": {"content": "overloaded"}}]}),
        event(chunk({"content": ""}, "error", error={"message": "overloaded"})),
        b'event: error\ndata: {"message": "overloaded"}\n\n',
        event({"object": "error", "message": "overloaded", "code": 503}),
    ],
)
@pytest.mark.parametrize("before", [b"", event(chunk({"content": "half an answ"}))])
async def test_an_error_within_a_stream_is_the_error_of_the_body(failure, before):
    body = await joined(before + failure + event(chunk({"content": "er"}, "stop")) + DONE)
    assert "overloaded" in str(error_in(body))
    with pytest.raises(ValueError, match="without a whole message: .*overloaded"):
        read_reply(body)


async def test_a_reply_that_was_not_streamed_is_read_as_it_is():
    body = body_of({"content": "so"})
    assert await joined(orjson.dumps(body, option=orjson.OPT_INDENT_2), 3) == body
    assert await joined(b'{"error": {"message": "overloaded"}}') == {"error": {"message": "overloaded"}}
    with pytest.raises(ValueError, match="an HTML page: Bad gateway"):
        await joined(b"<html><title>Bad gateway</title></html>")
    with pytest.raises(ValueError, match="empty body"):
        await joined(b"")


async def test_an_event_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="no JSON: upstream went away"):
        await joined(b"data: upstream went away\n\n" + DONE)


async def test_a_stream_without_choices_is_no_reply():
    with pytest.raises(ValueError, match="without a whole message"):
        read_reply(await joined(event({"id": "x", "choices": []}) + DONE))


async def test_nothing_is_waited_for_after_the_end(monkeypatch):
    monkeypatch.setattr("promptmill.streaming.DRAIN_TIMEOUT_S", 0.01)

    async def never_closed():
        yield as_stream(body_of({"content": "so"}))
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        assert await read_stream(never_closed()) == body_of({"content": "so"})


def test_a_stream_is_asked_for_only_when_it_is_wanted():
    assert stream_fields(make_settings("http://127.0.0.1:1/v1")) == {}
    fields = stream_fields(make_settings("http://127.0.0.1:1/v1", stream=True))
    assert fields == {"stream": True, "stream_options": {"include_usage": True}}
