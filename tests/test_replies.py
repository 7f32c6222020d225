"""Reading a reply: reasoning from wherever it stands, once; calls with ids and arguments that can be used; usage."""

import orjson
import pytest

from promptmill.bodies import decode_body
from promptmill.quirks.base import ModelRequest
from promptmill.records import Message, ToolCall, Usage
from promptmill.replies import MAX_TOKENS, error_in, is_empty, read_reply, read_usage, refusal_reason


def reply_of(message, finish_reason="stop", **body):
    return read_reply({"choices": [{"message": message, "finish_reason": finish_reason}], **body})


def read(**message):
    reply = reply_of({"role": "assistant", **message}).message
    return reply.reasoning, reply.content


MESSAGES = [
    {"reasoning": "why", "content": "so"},
    {"reasoning_content": "why", "content": "so"},
    {"thinking": "why", "content": "so"},
    {"reasoning": " why\n", "content": "\nso "},
    {"reasoning": "", "reasoning_content": "why", "content": "so"},
    {"reasoning": " ", "reasoning_content": "why", "content": "so"},
    {"reasoning": None, "reasoning_content": None, "content": "<think>why</think>so"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "why"}], "content": "so"},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "why"}], "content": "so"},
    {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"thinking": "why"}], "content": "so"},
    {"thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "s"}], "content": "so"},
    {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, {"text": "so"}]},
    {"content": [{"type": "reasoning", "text": "why"}, {"type": "text", "text": "so"}]},
    {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}, "so"]},
    {"content": "<think>\nwhy\n</think>\n\nso"},
    {"content": "\n<think>why</think>so"},
    {"content": "<Think>why</think>so"},
    {"content": "<thinking>why</thinking>so"},
    {"content": "<thought>why</thought>so"},
    {"content": "<reasoning>why</reasoning>so"},
    {"content": "<REASONING_SCRATCHPAD>why</REASONING_SCRATCHPAD>so"},
    {"content": "[THINK]why[/THINK]so"},
    {"content": "<think></think><think>why</think>so"},
    {"content": "<think>why</thinking>so"},
    {"content": [{"type": "text", "text": "<think>why</think>"}, {"type": "text", "text": "so"}]},
    {"content": "why</think>so"},
    {"content": "why\n</think>\n\nso"},
    {"content": "\nwhy</REASONING_SCRATCHPAD>\nso"},
    {"reasoning": "why", "content": "</think>\n\nso"},
    {"reasoning": "why", "content": "why</think>so"},
    {"reasoning": "why", "reasoning_content": "why", "content": "<think>why</think>so"},
    {"reasoning": "why", "reasoning_details": [{"text": "why"}], "content": "so"},
]
"""Messages that all say the same."""


@pytest.mark.parametrize("message", MESSAGES)
def test_reasoning_is_taken_once_from_wherever_it_stands(message):
    assert read(**message) == ("why", "so")


LONG = "First I look at the files, then I read each of them, and then I say what is in them."


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning": "a b", "reasoning_content": "a  b\n"}, "a b"),
        ({"reasoning": LONG[:60], "reasoning_content": LONG}, LONG),
        ({"reasoning": LONG, "reasoning_details": [{"text": LONG.replace("each", "all")}]}, LONG),
        ({"reasoning": LONG, "reasoning_details": [{"text": LONG[:40]}, {"text": LONG[40:]}]}, LONG),
        ({"reasoning": "One thing.", "reasoning_content": "Another thing."}, "One thing.\n\nAnother thing."),
        ({"reasoning": "One thing.", "content": "<think>Another thing.</think>so"}, "One thing.\n\nAnother thing."),
    ],
)
def test_what_two_fields_say_alike_is_kept_once_and_what_one_says_alone_is_kept(message, reasoning):
    assert read(**{"content": "so", **message}) == (reasoning, "so")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>a</think>\n<think>b</think>so", ("a\n\nb", "so")),
        ("so <think>x</think>", ("", "so <think>x</think>")),
        ("<think>never closed", ("never closed", "")),
        ("<think>a <think> b</think>so", ("a <think> b", "so")),
        ("<think>a <think>b</think> c</think>so", ("a <think>b</think> c", "so")),
        ("<think>a<think>b<think>c</think>d</think>e</think>so", ("a<think>b<think>c</think>d</think>e", "so")),
        ("<think><think>why</think>so", ("<think>why", "so")),
        ("<think>a `<think>` b</think>Close it with </think>.", ("a `<think>` b", "Close it with </think>.")),
        ("<think>a<think>b</think>c</think>So:\n```\n</think>\n```", ("a<think>b</think>c", "So:\n```\n</think>\n```")),
        ("<think>why </think> so </think>.", ("why", "so </think>.")),
        ("why</think><think>more</think>so", ("why\n\nmore", "so")),
        ("</think><think>why</think>so", ("why", "so")),
        ("<think>why</think></think>\nso", ("why", "so")),
        ("<think>a</think> b</think>so", ("a", "b</think>so")),
        ("<think>x</think>The tag <think> opens it.", ("x", "The tag <think> opens it.")),
        ("<think>x</think><think> is the tag that opens it.", ("x", "<think> is the tag that opens it.")),
        ("<think></think><think>never closed", ("never closed", "")),
        ("</reasoning>so", ("", "</reasoning>so")),
        ("Close it with `</think>` here.", ("", "Close it with `</think>` here.")),
        ("The tag </think> ends it.", ("", "The tag </think> ends it.")),
        ("See:\n```\nwhy</think>so\n```", ("", "See:\n```\nwhy</think>so\n```")),
        ("", ("", "")),
        (None, ("", "")),
        (3, ("", "")),
        ([{"type": "image_url"}, "x", {"text": "so"}], ("", "xso")),
        ({"type": "text", "text": "so"}, ("", "so")),
    ],
)
def test_only_tags_that_open_the_text_or_close_what_was_opened_before_it_are_reasoning(content, expected):
    assert read(content=content) == expected


def test_a_lone_closing_tag_after_known_reasoning_is_text():
    assert read(reasoning="why", content="so</think>and so") == ("why", "so</think>and so")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think> is the tag that opens it.", ("why", "<think> is the tag that opens it.")),
        ("<think> opens and </think> closes it.", ("why", "<think> opens and </think> closes it.")),
        ("<think>why", ("why", "")),
        ("<think> why </think> so", ("why", "so")),
        ("<think>more</think>so", ("why\n\nmore", "so")),
        ("</think> so", ("why", "so")),
    ],
)
def test_an_answer_that_speaks_of_the_tags_is_text_where_its_reasoning_is_known(content, expected):
    assert read(reasoning="why", content=content) == expected


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


@pytest.mark.parametrize("missing", [None, "", 0, [], ["a"], {"a": 1}, True, 1.5, 10**30])
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


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("terminal", "read_file", "write_file")]


def asked(*messages, tools=TOOLS, **fields):
    return ModelRequest(messages, tools, fields)


def offered(message, request=None, finish_reason="stop", **body):
    """The reply to a request that offered tools."""
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return read_reply({"choices": [choice], **body}, request or asked())


def test_an_id_of_an_earlier_turn_is_not_used_again():
    earlier = Message("assistant", "", tool_calls=(ToolCall("a", "terminal", "{}"),))
    (call,) = offered({"tool_calls": [entry()]}, asked(earlier)).message.tool_calls
    assert call.id not in ("", "a")
    (call,) = offered({"tool_calls": [entry(id="b")]}, asked(earlier)).message.tool_calls
    assert call.id == "b"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"function_call": {"name": "terminal", "arguments": '{"a":1}'}}, ("terminal", '{"a":1}')),
        ({"tool_calls": [], "function_call": {"name": "terminal", "arguments": "{}"}}, ("terminal", "{}")),
        ({"tool_calls": {"id": "a", "function": {"name": "terminal", "arguments": "{}"}}}, ("terminal", "{}")),
        ({"tool_calls": [{"name": "terminal", "arguments": {"a": 1}}]}, ("terminal", '{"a":1}')),
        ({"tool_calls": [{"function": {"name": "terminal", "parameters": {"a": 1}}}]}, ("terminal", '{"a":1}')),
    ],
)
def test_calls_in_older_or_flat_forms_are_read(message, expected):
    (call,) = offered(message).message.tool_calls
    assert (call.name, call.arguments) == expected
    assert call.id


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Terminal", "terminal"), ("read-file", "read_file"), ("Read File", "read_file"), ("ReadFile", "read_file"),
        ("readFile", "read_file"), ("read.file", "read_file"), ("functions.terminal", "terminal"),
        ("functions.terminal:0", "terminal"), ("tools:terminal", "terminal"), ("default_api.read_file", "read_file"),
        ("terminal<|channel|>commentary", "terminal"), (" terminal ", "terminal"), ("terminal()", "terminal"),
    ],
)  # fmt: skip
def test_a_name_that_can_mean_one_tool_only_is_taken_for_it_and_what_was_written_is_kept(written, name):
    (call,) = offered({"tool_calls": [{"id": "a", "function": {"name": written}}]}).message.tool_calls
    assert (call.name, call.written) == (name, written)


@pytest.mark.parametrize("written", ["termnal", "read_fil", "file", "", "functions.", "terminal2", "x" * 9999])
def test_a_name_that_is_misspelt_stays_as_it_is(written):
    (call,) = offered({"tool_calls": [{"id": "a", "function": {"name": written}}]}).message.tool_calls
    assert (call.name, call.written) == (written, "")


def test_a_name_that_can_mean_two_tools_stays_as_it_is():
    tools = [{"type": "function", "function": {"name": name}} for name in ("read_file", "readfile")]
    message = {"tool_calls": [{"id": "a", "function": {"name": "Read_File"}}]}
    (call,) = offered(message, asked(tools=tools)).message.tool_calls
    assert (call.name, call.written) == ("Read_File", "")


CALL_JSON = '{"name": "terminal", "arguments": {"command": "ls é"}}'
CALL_ARGUMENTS = '{"command":"ls é"}'


@pytest.mark.parametrize(
    ("content", "text", "written"),
    [
        (f"<tool_call>\n{CALL_JSON}\n</tool_call>", "", "text:terminal"),
        (f"I look.\n<tool_call>{CALL_JSON}</tool_call>\n", "I look.", "text:terminal"),
        (f"<tool_call>\n{CALL_JSON}", "", "text:terminal"),
        (f"<think>why</think>\n<tool_call>\n{CALL_JSON}\n</tool_call>", "", "text:terminal"),
        (CALL_JSON, "", "text:terminal"),
        (f"[{CALL_JSON}]", "", "text:terminal"),
        (f"```json\n{CALL_JSON}\n```", "", "text:terminal"),
        (CALL_JSON.replace("arguments", "parameters"), "", "text:terminal"),
        (CALL_JSON.replace("terminal", "functions.Terminal"), "", "text:functions.Terminal"),
        (f'{{"type": "function", "function": {CALL_JSON}}}', "", "text:terminal"),
        ("<tool_call>\n<function=terminal>\n<parameter=command>\nls é\n</parameter>\n</function>\n</tool_call>", "",
         "text:terminal"),
    ],
)  # fmt: skip
def test_a_call_that_was_written_as_text_is_a_call(content, text, written):
    message = offered({"content": content}).message
    assert [(call.name, call.arguments, call.written) for call in message.tool_calls] == [
        ("terminal", CALL_ARGUMENTS, written)
    ]
    assert message.content == text
    assert all(call.id for call in message.tool_calls)


def test_several_calls_written_as_text_are_all_calls():
    block = f"<tool_call>\n{CALL_JSON}\n</tool_call>"
    message = offered({"content": f"{block}\n{block}"}).message
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize(
    "content",
    [
        CALL_JSON.replace("terminal", "teleport"),
        CALL_JSON.replace("}}", "}"),
        f"<tool_call>\n{CALL_JSON}\n</tool_call>\nThat is how a call is written.",
        f"Write `<tool_call>{CALL_JSON}</tool_call>`",
        f"So:\n```\n<tool_call>{CALL_JSON}</tool_call>\n```",
        f"I write <tool_call>{CALL_JSON.replace('terminal', 'teleport')}</tool_call>",
        f"Write `<tool_call>{CALL_JSON.replace('terminal', 'teleport')}</tool_call>`",
        f"So:\n```\n<tool_call>{CALL_JSON[:-1]}</tool_call>\n```",
        f"<tool_call>\n{CALL_JSON[:-1]}\n</tool_call>\nThat is how a call is written.",
        f"<tool_call>\n{CALL_JSON}\n</tool_call>\nor\n<tool_call>\n{CALL_JSON}\n</tool_call>",
        "<tool_call> is the tag around a call.", "<tool_call></tool_call>", "<tool_call>so</tool_call>",
        "<tool_call><function=terminal>" + "<parameter=a>" * 5000,
        "<tool_call>{</tool_call>" * 11,
        f"The answer is {CALL_JSON}",
        '{"name": "terminal"}',
        '{"name": "terminal", "arguments": {}, "age": 3}',
        '{"name": 3, "arguments": {}}',
        "[]", "[1]", "{}", "42", '"terminal"', "[" * 100_000,
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_stays_text(content):
    message = offered({"content": content}).message
    assert (message.tool_calls, message.content) == ((), content)


@pytest.mark.parametrize("said", ["", "I look.\n"])
@pytest.mark.parametrize(
    ("block", "name"),
    [
        (CALL_JSON.replace("terminal", "teleport"), "teleport"),
        ("<function=teleport>\n<parameter=command>\nls é\n</parameter>\n</function>", "teleport"),
    ],
)
def test_a_call_in_tags_of_a_tool_that_there_is_not_is_a_call_of_it(said, block, name):
    message = offered({"content": f"{said}<tool_call>\n{block}\n</tool_call>"}).message
    assert [(call.name, call.arguments.replace(" :", ":"), call.written) for call in message.tool_calls] == [
        (name, CALL_ARGUMENTS, f"text:{name}")
    ]
    assert message.content == said.strip()


def test_a_call_in_a_fence_that_says_so_may_name_any_tool():
    message = offered({"content": f"```tool_call\n{CALL_JSON.replace('terminal', 'teleport')}\n```"}).message
    assert [call.name for call in message.tool_calls] == ["teleport"]


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (CALL_JSON[:-1], "terminal"),
        (CALL_JSON + "}", "terminal"),
        (CALL_JSON + " so", "terminal"),
        ('{"name": "terminal", "arguments": {"command": "a" "b"}}', "terminal"),
        ("{'name': 'terminal'}", ""),
        ('{"command": "ls"}', ""),
        ("{}", ""),
        ("[]", ""),
        (f"[{CALL_JSON}, 1]", ""),
        ("<function=terminal>\n<parameter=command>\nls\n</function>", "terminal"),
        ("<function=terminal>\n<parameter=a>1<parameter=b>2</parameter></function>", "terminal"),
        ("<function=terminal>so</function>", "terminal"),
        ("<function=terminal>", "terminal"),
        ("[" * 5000, ""),
    ],
)
def test_a_broken_call_in_tags_is_a_call_with_all_of_it_as_arguments_that_no_tool_takes(block, name):
    content = f"<tool_call>\n{block}\n</tool_call>"
    (call,) = offered({"content": content}).message.tool_calls
    assert (call.name, call.arguments) == (name, block)
    assert call.name == "" or "invalid_arguments" in orjson.loads(call.json_arguments)


def test_a_call_that_breaks_off_is_one_where_its_name_can_be_read():
    (call,) = offered({"content": f"<tool_call>\n{CALL_JSON[:-3]}"}).message.tool_calls
    assert (call.name, call.arguments) == ("terminal", CALL_JSON[:-3])
    assert offered({"content": "<tool_call>\n{'name'"}).message.tool_calls == ()


def test_a_broken_call_beside_a_good_one_takes_nothing_of_it():
    content = f"<tool_call>\n{CALL_JSON}\n</tool_call>\n<tool_call>\n{{}}\n</tool_call>"
    first, second = offered({"content": content}).message.tool_calls
    assert (first.name, first.arguments) == ("terminal", CALL_ARGUMENTS)
    assert (second.name, second.arguments) == ("", "{}")


def test_a_call_in_tags_may_speak_of_the_tags():
    arguments = {"command": "echo '<tool_call>{}</tool_call>'"}
    block = orjson.dumps({"name": "terminal", "arguments": arguments}).decode()
    for content in (f"<tool_call>{block}</tool_call>", f"<tool_call>\n{block}\n</tool_call>\n<tool_call>{block}"):
        calls = offered({"content": content}).message.tool_calls
        assert {orjson.loads(call.arguments)["command"] for call in calls} == {arguments["command"]}
        assert len(calls) == content.count(block)


def test_without_offered_tools_no_text_is_a_call():
    message = offered({"content": CALL_JSON}, asked(tools=())).message
    assert (message.tool_calls, message.content) == ((), CALL_JSON)


def test_beside_a_real_call_no_text_is_one():
    message = offered({"content": CALL_JSON, "tool_calls": [entry()]}).message
    assert (len(message.tool_calls), message.content) == (1, CALL_JSON)


@pytest.mark.parametrize(
    ("finish_reason", "limit", "cut"),
    [
        ("tool_calls", {}, False), ("length", {}, True), ("tool_calls", {"max_tokens": 10}, True),
        ("stop", {"max_completion_tokens": 10}, True), ("tool_calls", {"max_tokens": 11}, False),
        ("tool_calls", {"max_tokens": 9}, False), ("max_tokens", {}, True), ("MAX_TOKENS", {}, True),
    ],
)  # fmt: skip
def test_a_call_at_the_token_limit_is_cut_whatever_the_finish_reason_claims(finish_reason, limit, cut):
    for usage in ({"completion_tokens": 10}, {"completion_tokens": 10.0}, {"completion_tokens": "10"},
                  {"output_tokens": 10}, {"completion_tokens": 10, "prompt_tokens": -1}):  # fmt: skip
        assert offered({"tool_calls": [entry()]}, asked(**limit), finish_reason, usage=usage).cut is cut


def test_arguments_with_half_a_surrogate_pair_are_mended():
    (call,) = calls_of(entry('{"a": "x\\ud83c"}'))
    assert call.arguments == call.json_arguments == '{"a": "x�"}'
    assert calls_of(entry('{"a": "\\ud83c\\udf89"}'))[0].arguments == '{"a": "\\ud83c\\udf89"}'
    assert calls_of(entry('{"a": "\\ud83c'))[0].arguments == '{"a": "\\ud83c'


def test_what_an_endpoint_tied_to_a_call_goes_back_with_it():
    extra = {"google": {"thought_signature": "sig"}}
    message = offered({"tool_calls": [entry(extra_content=extra), entry(id="b")]}).message
    assert message.echo == {
        "tool_calls": [call.as_openai() | more for call, more in zip(
            message.tool_calls, ({"extra_content": extra}, {}), strict=True)]
    }  # fmt: skip


def test_signed_parts_and_blocks_go_back_unchanged():
    parts = [{"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "so"}]
    assert reply_of({"content": parts}).message.echo == {"content": parts}
    blocks = [{"type": "thinking", "thinking": "why", "signature": "s"}]
    assert reply_of({"content": "so", "thinking_blocks": blocks}).message.echo == {"thinking_blocks": blocks}
    assert reply_of({"content": [{"type": "text", "text": "so"}]}).message.echo == {}


def test_what_is_no_call_is_left_out():
    assert calls_of(None, "x", {}, {"function": None}, {"id": "a", "function": "terminal"}) == ()
    assert reply_of({"content": "so", "tool_calls": None}).message.tool_calls == ()
    assert reply_of({"content": "so", "tool_calls": {}}).message.tool_calls == ()
    assert reply_of({"content": "so", "function_call": {}}).message.tool_calls == ()


def test_a_call_without_name_has_an_empty_one():
    (call,) = calls_of({"id": "a", "function": {}})
    assert (call.name, call.arguments) == ("", "{}")


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Usage()),
        ("x", Usage()),
        ({}, Usage()),
        ({"prompt_tokens": 7.0, "completion_tokens": "5", "total_tokens": 12.0}, Usage(7, 5, 0, 0, 1)),
        ({"prompt_tokens": " 7 ", "completion_tokens": "5.0"}, Usage(7, 5, 0, 0, 1)),
        ({"input_tokens": 7, "output_tokens": 5}, Usage(7, 5, 0, 0, 1)),
        ({"prompt_tokens": None, "input_tokens": 7, "output_tokens": 5}, Usage(7, 5, 0, 0, 1)),
        (
            {
                "input_tokens": 7,
                "output_tokens": 5,
                "input_tokens_details": {"cached_tokens": 2.0},
                "output_tokens_details": {"reasoning_tokens": "3"},
            },
            Usage(7, 5, 3, 2, 1),
        ),
        ({"total_tokens": 12}, Usage(12, 0, 0, 0, 1)),
        ({"total_tokens": 12, "completion_tokens": 5}, Usage(7, 5, 0, 0, 1)),
        ({"total_tokens": 12, "prompt_tokens": 7}, Usage(7, 5, 0, 0, 1)),
        ({"total_tokens": 1, "prompt_tokens": 7}, Usage(7, 0, 0, 0, 1)),
        ({"prompt_tokens": 7}, Usage(7, 0, 0, 0, 1)),
        ({"prompt_tokens": 10**400, "completion_tokens": 10**30}, Usage(MAX_TOKENS, MAX_TOKENS, 0, 0, 1)),
        *(({"prompt_tokens": odd}, Usage()) for odd in (-1, "-1", 1.5, "x", "", "9" * 99, "nan", "inf", [1], {}, True)),
        ({"total_tokens": -1}, Usage()),
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
        ({"prompt_tokens": -1, "completion_tokens": "5", "prompt_tokens_details": None}, Usage(0, 5)),
        ({"prompt_tokens": -1, "completion_tokens": 5, "total_tokens": 12}, Usage(7, 5)),
        ({"prompt_tokens": True, "completion_tokens_details": []}, Usage()),
        ({"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": -3}}, Usage(0, 5, 0, 0, 1)),
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
        ({"choices": [{"message": {"content": "ha"}}], "error": {"message": "overloaded"}}, "overloaded"),
        ({"object": "error", "message": "overloaded", "code": 400}, "overloaded"),
        ({"choices": [{"message": {"content": "ha"}, "finish_reason": "abort"}]}, "abort"),
        ({"choices": [{"message": {"content": "ha"}, "finish_reason": {"type": "abort"}}]}, "abort"),
        ({"choices": [{"message": {"content": "ha"}, "finish_reason": "insufficient_system_resource"}]}, "resource"),
        ({"detail": "Not found"}, "Not found"),
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


@pytest.mark.parametrize("finish_reason", ["content_filter", "SAFETY", "refusal", "sensitive", "PROHIBITED_CONTENT"])
def test_a_filtered_reply_is_refused_whatever_text_it_has(finish_reason):
    assert refusal_reason(reply_of({"content": "so"}, finish_reason))


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "I will not."},
        {"content": "so", "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
    ],
)
def test_the_models_own_refusal_is_one(message):
    assert refusal_reason(reply_of(message)) == "the model refused: I will not."
    assert refusal_reason(reply_of(message | {"refusal": " ", "content": "so"})) == ""


def test_the_error_of_a_body_is_found_wherever_it_stands():
    error = {"message": "overloaded", "code": 502}
    assert error_in({"error": error}) == error
    assert error_in({"error": None, "choices": [{"error": error, "message": {}}]}) == error
    assert error_in({"choices": [{"message": {}, "finish_reason": "error"}]}) == (
        "the reply broke off with finish reason 'error'"
    )
    assert error_in({"choices": [{"message": {}, "finish_reason": "stop"}]}) is None
    assert error_in([]) is None


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (rb'{"a": "x\ud83c"}', {"a": "x\ufffd"}),
        (rb'{"a": "\ud83c\udf89", "b": ["\udf89"]}', {"a": "\U0001f389", "b": ["\ufffd"]}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
        (b'{"a": NaN}', {"a": None}),
    ],
)
def test_a_body_that_is_nearly_json_is_mended(body, value):
    assert decode_body(body) == value
    assert orjson.loads(orjson.dumps(decode_body(body))) == value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "an empty body instead of JSON"),
        (b" \n", "an empty body instead of JSON"),
        (
            b"<!DOCTYPE html><html><head><style>b{}</style><title>502</title></head>Bad\ngateway",
            "page: 502 Bad gateway",
        ),
        (b"upstream timed out", "no JSON: upstream timed out"),
        (b'{"a": ', 'no JSON: {"a":'),
        (b"[" * 100_000, "no JSON: "),
    ],
)
def test_a_body_that_is_no_json_is_refused_in_a_sentence(body, said):
    with pytest.raises(ValueError, match="the endpoint answered with ") as refusal:
        decode_body(body)
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 300
