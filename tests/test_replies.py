"""Reading a reply: reasoning from wherever it stands, once; calls with ids and arguments that can be used; usage."""

import pytest

from promptmill.records import Usage
from promptmill.replies import is_empty, read_reply, read_usage, refusal_reason


def reply_of(message, finish_reason="stop", **body):
    return read_reply({"choices": [{"message": message, "finish_reason": finish_reason}], **body})


def read(**message):
    reply = reply_of({"role": "assistant", **message}).message
    return reply.reasoning, reply.content


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "why", "content": "so"},
        {"reasoning_content": "why", "content": "so"},
        {"reasoning": " why\n", "content": "\nso "},
        {"reasoning": "", "reasoning_content": "why", "content": "so"},
        {"reasoning": " ", "reasoning_content": "why", "content": "so"},
        {"reasoning": None, "reasoning_content": None, "content": "<think>why</think>so"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "why"}], "content": "so"},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "why"}], "content": "so"},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"thinking": "why"}], "content": "so"},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, {"text": "so"}]},
        {"content": "<think>\nwhy\n</think>\n\nso"},
        {"content": "\n<think>why</think>so"},
        {"content": "<thinking>why</thinking>so"},
        {"content": "<thought>why</thought>so"},
        {"content": "<reasoning>why</reasoning>so"},
        {"content": "<REASONING_SCRATCHPAD>why</REASONING_SCRATCHPAD>so"},
        {"content": "<think></think><think>why</think>so"},
        {"content": [{"type": "text", "text": "<think>why</think>"}, {"type": "text", "text": "so"}]},
        {"reasoning": "why", "reasoning_content": "why", "content": "<think>why</think>so"},
        {"reasoning": "why", "reasoning_details": [{"text": "why"}], "content": "so"},
    ],
)
def test_reasoning_is_taken_once_from_wherever_it_stands(message):
    assert read(**message) == ("why", "so")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>a</think>\n<think>b</think>so", ("a\n\nb", "so")),
        ("so <think>x</think>", ("", "so <think>x</think>")),
        ("<think>never closed", ("", "<think>never closed")),
        ("<think>a</thinking>so", ("", "<think>a</thinking>so")),
        ("<think>a <think> b</think>so", ("a <think> b", "so")),
        ("", ("", "")),
        (None, ("", "")),
        (3, ("", "")),
        ([{"type": "image_url"}, "x", {"text": "so"}], ("", "so")),
    ],
)
def test_only_leading_closed_tags_are_reasoning(content, expected):
    assert read(content=content) == expected


def test_several_details_are_paragraphs():
    details = [{"text": "a"}, {"text": " "}, "x", {"summary": "b"}]
    assert read(reasoning_details=details, content="so") == ("a\n\nb", "so")


def test_reasoning_details_go_back_unchanged_and_nothing_else_does():
    details = [{"type": "reasoning.encrypted", "data": "x"}]
    message = reply_of({"content": "so", "reasoning_details": details, "reasoning": "why", "audio": {}}).message
    assert message.echo == {"reasoning_details": details}
    assert reply_of({"content": "so", "reasoning_details": []}).message.echo == {}


def calls_of(*entries):
    return reply_of({"content": None, "tool_calls": list(entries)}, "tool_calls").message.tool_calls


def entry(arguments="{}", **fields):
    return {"id": "a", "type": "function", "function": {"name": "terminal", "arguments": arguments}} | fields


def test_calls_keep_their_order_ids_and_arguments_as_written():
    written = '{"b": 1,  "a": "\\u00e9"}'
    first, second = calls_of(entry(written), entry("{}", id="b"))
    assert (first.id, first.name, first.arguments) == ("a", "terminal", written)
    assert second.id == "b"


@pytest.mark.parametrize("missing", [None, "", 0])
def test_a_missing_id_is_made_up(missing):
    ids = [call.id for call in calls_of(entry(id=missing), entry(id=missing), entry(id="a"))]
    assert len(set(ids)) == 3
    assert all(ids)
    assert ids[2] == "a"


def test_a_repeated_id_is_made_up():
    first, second, third = calls_of(entry(), entry(), entry(id=7))
    assert first.id == "a"
    assert second.id not in ("", "a")
    assert third.id == "7"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a":1}'),
        (None, "{}"),
        ("", "{}"),
        ("  ", "{}"),
        ({}, "{}"),
        ("{broken", "{broken"),
        ([1], "[1]"),
        ("null", "null"),
    ],
)
def test_arguments_become_text(arguments, expected):
    assert calls_of(entry(arguments))[0].arguments == expected


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "null", '"x"', "3"])
def test_arguments_that_are_no_object_are_saved_whole_within_one(arguments):
    (call,) = calls_of(entry(arguments))
    assert call.arguments == arguments
    assert call.json_arguments == '{"invalid_arguments":%s}' % ('"' + arguments.replace('"', '\\"') + '"')


def test_what_is_no_call_is_left_out():
    assert calls_of(None, "x", {}, {"function": None}, {"id": "a", "function": "terminal"}) == ()
    assert reply_of({"content": "so", "tool_calls": None}).message.tool_calls == ()
    assert reply_of({"content": "so", "tool_calls": {}}).message.tool_calls == ()


def test_a_call_without_name_has_an_empty_one():
    (call,) = calls_of({"id": "a", "function": {}})
    assert (call.name, call.arguments) == ("", "{}")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Usage()),
        ("x", Usage()),
        ({}, Usage(reported_calls=1)),
        ({"prompt_tokens": 7, "completion_tokens": 5}, Usage(7, 5, 0, 0, 1)),
        (
            {
                "prompt_tokens": 7,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(7, 5, 3, 2, 1),
        ),
        ({"prompt_tokens": -1, "completion_tokens": "5", "prompt_tokens_details": None}, Usage(reported_calls=1)),
        ({"prompt_tokens": True, "completion_tokens_details": []}, Usage(reported_calls=1)),
    ],
)
def test_usage_is_what_the_endpoint_counted(usage, expected):
    assert read_usage(usage) == expected
    assert reply_of({"content": "so"}, usage=usage).usage == expected


def test_usage_adds_up():
    assert Usage(1, 2, 3, 4, 5) + Usage(10, 20, 30, 40, 50) == Usage(11, 22, 33, 44, 55)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "overloaded", "code": 502}}, "overloaded"),
        ({"error": "overloaded"}, "overloaded"),
        ({"choices": []}, "choices"),
        ({"choices": None}, "choices"),
        ({"choices": [None]}, "choices"),
        ({"choices": [{"message": None}]}, "choices"),
        ({"choices": {"message": {}}}, "choices"),
        ({"choices": [{"message": {"content": "ha"}, "error": {"message": "overloaded"}}]}, "overloaded"),
        ({"choices": [{"message": {"content": "ha"}, "finish_reason": "error"}]}, "error"),
        ([], r"\[\]"),
        (None, "None"),
        ("text", "text"),
    ],
)
def test_what_is_no_whole_completion_is_refused_with_what_it_says(body, said):
    with pytest.raises(ValueError, match=said):
        read_reply(body)


@pytest.mark.parametrize(("finish_reason", "cut"), [("length", True), ("stop", False), (None, False)])
def test_a_reply_that_the_token_limit_ended_is_cut(finish_reason, cut):
    assert reply_of({"content": "so"}, finish_reason).cut is cut


def test_an_empty_reply_and_a_refused_one_are_told_apart():
    assert is_empty(reply_of({"content": " "}))
    assert is_empty(reply_of({"content": None, "reasoning": "why"}))
    assert not is_empty(reply_of({"content": ""}, "length"))
    assert not is_empty(reply_of({"content": None, "tool_calls": [entry()]}))
    assert "content filter" in refusal_reason(reply_of({"content": "so"}, "content_filter"))
    assert refusal_reason(reply_of({"content": "so"})) == ""
