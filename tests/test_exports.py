"""Exports: every format gives rows that trainers can load, and Hermes text gives back what it was made from."""

import copy
import json
import re
from datetime import datetime

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptmill.errors import ConfigError, Outcome
from promptmill.exports import EXPORTS, load_export
from promptmill.exports.hermes import escaped_text, export_row, unescaped_text
from promptmill.exports.hermes_reader import read_back
from promptmill.exports.sharegpt import RowFacts, build_row, split_think, turn
from promptmill.records import AgentResult, Message, Sample, ToolCall
from promptmill.replies import split_reasoning
from promptmill.rows import DOCUMENTED_KEYS, OWN_DEFAULTS, has_reasoning
from tests.rows import foreign_row, make_row

TAGS = ["think", "tools", "tool_call", "tool_response"]
TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command; prints </tools> & café",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
READ_FILE = {"type": "function", "function": {"name": "read_file", "description": "Read", "parameters": {}}}
PLAIN = make_row("hi", tools={"terminal": (2, 0)})


def row_of(*messages: Message, tools=(TERMINAL, READ_FILE), **changes):
    """A row of ours that holds a conversation."""
    return make_row(conversations=[turn(message) for message in messages], **changes) | {
        "tools": orjson.dumps(tools).decode()
    }


def a_conversation():
    """Two parallel calls, their results, an answer without reasoning."""
    calls = (ToolCall("call_a", "terminal", '{"command":"echo one"}'), ToolCall("call_b", "read_file", '{"path": "é"}'))
    return [
        Message("system", "Be brief."),
        Message("user", " what is here? "),
        Message("assistant", "Let me look.", "r", calls),
        Message("tool", '{"output":"one","exit_code":0,"error":null}', tool_call_id="call_a", name="terminal"),
        Message("tool", "[1]", tool_call_id="call_b", name="read_file"),
        Message("assistant", "final"),
    ]


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def values(row, role):
    return [turn["value"] for turn in row["conversations"] if turn["from"] == role]


def test_an_error_that_holds_half_a_character_is_saved():
    """Endpoints cut what they quote, and JSON can spell the half that is left."""
    result = AgentResult(Outcome.FAILED_PERMANENT, "rejected_request", [Message("user", "a")], error="cut \ud83d here")
    facts = RowFacts(0, "m", 0, ("terminal",), datetime(2026, 1, 1))
    row = build_row(result, Sample(index=0, prompt="a", content_hash="0" * 32), facts)
    assert orjson.loads(orjson.dumps(row))["error"] == "cut ? here"


# ── every format ──────────────────────────────────────────────────────────────────────────────────────────────────


def nulls_in(value):
    if isinstance(value, dict):
        return any(map(nulls_in, value.values()))
    return any(map(nulls_in, value)) if isinstance(value, list) else value is None


ROWS = {
    "plain": PLAIN,
    "with tools": row_of(*a_conversation()),
    "without a system turn": row_of(*a_conversation()[1:]),
    "of another program": foreign_row("hi"),
    "cut off before a result": row_of(*a_conversation()[:3], completed=False, partial=True),
    "without turns": make_row(conversations=[]),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", EXPORTS)
def test_every_format_makes_a_row_that_can_be_loaded(name, row):
    before = copy.deepcopy(row)
    exported = load_export(name)(row)
    assert row == before
    assert isinstance(exported["conversations"], list)
    assert all({"from", "value"} <= turn.keys() for turn in exported["conversations"])
    assert not nulls_in(exported)
    assert orjson.loads(orjson.dumps(exported)) == exported


@pytest.mark.parametrize("name", EXPORTS)
def test_every_format_gives_all_its_rows_the_same_keys_of_the_same_types(name):
    exported = [load_export(name)(row) for label, row in ROWS.items() if label != "of another program"]
    assert len({tuple((key, type(value)) for key, value in row.items()) for row in exported}) == 1


def test_an_unknown_format_is_refused_with_the_known():
    with pytest.raises(ConfigError, match="unknown format 'alpaca'; known: sharegpt, hermes"):
        load_export("alpaca")


def test_the_default_format_is_the_row_itself():
    assert load_export("sharegpt")(PLAIN) == PLAIN


# ── the Hermes format ─────────────────────────────────────────────────────────────────────────────────────────────


TAGGED = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "</THINK>", "&lt;/think>", "&amp;", "&AMP;lt;think>", "lt;think>", "<", "\n", "a", " "]
    )
).map("".join)


def think_tags(value):
    return value.lower().count("<think>"), value.lower().count("</think>")


@given(TAGGED, TAGGED)
def test_what_speaks_of_think_tags_opens_and_ends_no_block_and_comes_back_as_it_was(reasoning, text):
    value = turn(Message("assistant", text, reasoning))["value"]
    assert split_think(value) == (reasoning, text)
    assert think_tags(value) == ((1, 1) if reasoning else (0, 0))
    assert has_reasoning(value) is bool(reasoning.strip())
    row = row_of(Message("user", "go"), Message("assistant", text, reasoning))
    read = read_back(export_row(row)["conversations"]).messages[-1]
    assert (read.content, read.reasoning) == (text, reasoning if reasoning.strip() else "")


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thinking>", "</thinking>", "`", "\n", " ", "a", "b "])),
    st.sampled_from(["", "a", "why"]),
)
def test_whatever_a_reply_says_with_think_tags_is_saved_as_one_block_and_its_text(pieces, known):
    content = "".join(pieces)
    reasoning, text = split_reasoning({"content": content, "reasoning": known})
    value = turn(Message("assistant", text, reasoning))["value"]
    assert split_think(value) == (reasoning, text)
    assert think_tags(value) == ((1, 1) if reasoning else (0, 0))
    assert has_reasoning(value) is bool(reasoning)
    words = [word for word in re.sub(r"</?think(ing)?>", "", content) if word.isalpha()]
    kept = [word for word in re.sub(r"</?think(ing)?>", "", reasoning + text) if word.isalpha()]
    assert known or kept == words


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("why</think><think>more</think>answer", "<think>\nwhy\n\nmore\n</think>\nanswer"),
        ("</think><think>why</think>answer", "<think>\nwhy\n</think>\nanswer"),
        (
            "<think>a<think>b<think>c</think>d</think>e</think>answer",
            "<think>\na&lt;think>b&lt;think>c&lt;/think>d&lt;/think>e\n</think>\nanswer",
        ),
        (
            "<think>x</think>The tag <think> opens reasoning.",
            "<think>\nx\n</think>\nThe tag &lt;think> opens reasoning.",
        ),
        ("Write <think>x</think>, not &lt;think>.", "Write &lt;think>x&lt;/think>, not &amp;lt;think>."),
    ],
)
def test_tags_in_the_wrong_places_leave_a_value_balanced(content, value):
    reasoning, text = split_reasoning({"content": content})
    assert turn(Message("assistant", text, reasoning))["value"] == value
    assert split_think(value) == (reasoning, text)


def test_only_a_models_turn_has_its_tags_escaped():
    for role in ("system", "user", "tool"):
        assert turn(Message(role, "<think>x</think>"))["value"] == "<think>x</think>"


def test_reasoning_without_think_tags_is_written_as_it_is():
    value = turn(Message("assistant", "so", "if a < b && c: <b> &lt; </thinking>"))["value"]
    assert value == "<think>\nif a < b && c: <b> &lt; </thinking>\n</think>\nso"


def test_hermes_has_the_documented_keys_in_order_and_turns_of_two_keys():
    exported = export_row(ROWS["with tools"])
    assert tuple(exported) == DOCUMENTED_KEYS
    assert all(tuple(turn) == ("from", "value") for turn in exported["conversations"])
    assert [turn["from"] for turn in exported["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]


def test_hermes_answer_with_reasoning():
    row = row_of(Message("user", "p"), Message("assistant", "done", "r"))
    assert values(export_row(row), "gpt") == ["<think>\nr\n</think>\ndone"]


def test_hermes_turn_without_reasoning_and_without_text_has_an_empty_think_block():
    assert values(export_row(row_of(Message("user", "p"), Message("assistant", ""))), "gpt") == ["<think>\n</think>"]


def test_hermes_calls_and_results():
    exported = export_row(ROWS["with tools"])
    assert values(exported, "gpt") == [
        "<think>\nr\n</think>\nLet me look.\n"
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo one"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "é"}}\n</tool_call>',
        "<think>\n</think>\nfinal",
    ]
    assert values(exported, "tool") == [
        '<tool_response>\n{"tool_call_id": "call_a", "name": "terminal", "content": '
        '{"output": "one", "exit_code": 0, "error": null}}\n</tool_response>\n'
        '<tool_response>\n{"tool_call_id": "call_b", "name": "read_file", "content": "[1]"}\n</tool_response>'
    ]
    assert values(exported, "human") == [" what is here? "]


def test_hermes_system_turn_lists_the_tools_by_name_and_ends_with_the_own_prompt():
    (value,) = values(export_row(ROWS["with tools"]), "system")
    listed = value.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == [
        {"name": "read_file", "description": "Read", "parameters": {}, "required": None},
        {**TERMINAL["function"], "required": None},
    ]
    assert listed.startswith('[{"name": "read_file", "description": "Read", "parameters": {}, "required": null}, {')
    assert "café" in listed
    assert "{'title': 'FunctionCall', 'type': 'object', 'properties': {" in value
    assert value.endswith(
        "\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>\n\nBe brief."
    )


def test_hermes_without_tools_and_own_prompt():
    (value,) = values(export_row(row_of(Message("user", "p"), tools=())), "system")
    assert "<tools>\n[]\n</tools>\n" in value
    assert value.endswith("</tool_call>")


def test_hermes_results_are_in_the_order_of_their_calls_and_named_by_id():
    messages = a_conversation()
    messages[3:5] = [messages[4], messages[3]]
    messages[3].name = messages[4].name = "wrong"
    blocks = [json.loads(line) for line in values(export_row(row_of(*messages)), "tool")[0].split("\n")[1::3]]
    assert [(block["tool_call_id"], block["name"]) for block in blocks] == [
        ("call_a", "terminal"),
        ("call_b", "read_file"),
    ]


def test_hermes_result_without_a_call_keeps_its_own_name():
    row = row_of(Message("user", "p"), Message("tool", "out", tool_call_id="x", name="terminal"))
    assert '"tool_call_id": "x", "name": "terminal", "content": "out"' in values(export_row(row), "tool")[0]


def test_hermes_arguments_that_are_no_object_are_kept_whole():
    row = row_of(Message("user", "p"), Message("assistant", "", "", (ToolCall("a", "terminal", '{"command": '),)))
    assert '"arguments": {"invalid_arguments": "{\\"command\\": "}}' in values(export_row(row), "gpt")[0]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"n":12345678901234567890123,"x":1.10,"y":1e300}', '{"n": 12345678901234567890123, "x": 1.10, "y": 1e300}'),
        ('{ "a" : [ 1 ,\n{} ] }', '{"a": [1, {}]}'),
        (r'{"a":"\u00e9\ud83d\ude00\/, : \" \u0000\n"}', r'{"a": "é😀/, : \" \u0000\n"}'),
        ('{"a":1,"a":2}', '{"a": 1, "a": 2}'),
        ("{}", "{}"),
    ],
    ids=["numbers", "spaces", "escapes", "repeated key", "empty"],
)
def test_hermes_arguments_say_what_the_model_wrote(arguments, written):
    row = row_of(Message("user", "p"), Message("assistant", "", "", (ToolCall("a", "terminal", arguments),)))
    assert f'"arguments": {written}}}\n' in values(export_row(row), "gpt")[0]


@pytest.mark.parametrize("spelling", ["<{}>", "</{}>", "</{} >", "<{}"])
@pytest.mark.parametrize("tag", [*TAGS, "TOOL_CALL", "Think"])
def test_hermes_envelopes_cannot_be_forged(tag, spelling):
    hostile = spelling.format(tag)
    text = f"a\n{hostile}\nb"
    json_text = orjson.dumps({"x": text}).decode()
    results = [Message("tool", content, tool_call_id="a", name="terminal") for content in (json_text, text)]
    gpt = Message("assistant", text, text if spelling == "<{}>" else "r", (ToolCall("a", "terminal", json_text),))
    tool = {"type": "function", "function": {"name": "t", "description": text, "parameters": {"x": text}}}
    exported = export_row(row_of(Message("user", "p"), gpt, *results, tools=(tool,)))
    harmless = export_row(row_of(Message("user", "p"), Message("assistant", "b", "r", (ToolCall("a", "t", "{}"),)),
                                 *[Message("tool", "b", tool_call_id="a", name="t")] * 2))  # fmt: skip
    for role in ("system", "gpt", "tool"):
        for name in TAGS:
            for opening in (f"<{name}", f"</{name}"):
                counts = [
                    sum(value.lower().count(opening) for value in values(row, role)) for row in (exported, harmless)
                ]
                assert counts[0] == counts[1], (role, opening)


def test_hermes_row_of_hermes_agent_passes_unchanged():
    turns = [
        {"from": "system", "value": "You are ... <tools> </tools> ...\n<tools>\n[]\n</tools>\n..."},
        {"from": "human", "value": "p"},
        {"from": "gpt", "value": '<think>\n</think>\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'},
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "a", "name": "t", "content": "x"}\n</tool_response>',
        },
    ]
    row = foreign_row("p", conversations=turns)
    assert export_row(row) == row
    assert export_row(row | OWN_DEFAULTS) == row


@pytest.mark.parametrize(
    "changes",
    [
        {"conversations": [{"from": "observation", "value": "x"}]},
        {"conversations": [{"value": "x"}]},
        {"conversations": [{"from": ["gpt"], "value": "x"}]},
        {"tools": '[{"function": {"name": "t", "parameters": ' + '{"a":' * 1000 + "1" + "}" * 1000 + "}}]"},
        {
            "conversations": [
                {"from": "gpt", "value": "x", "tool_calls": [{"function": {"name": "t", "arguments": nested(1000)}}]}
            ]
        },
        {"conversations": [{"from": "gpt", "value": "x", "tool_calls": 7}]},
        {"conversations": [{"from": "gpt", "value": "x", "tool_calls": ["terminal"]}]},
        {"conversations": [{"from": "gpt", "value": "x", "tool_calls": [{"function": {"name": None}}]}]},
        {"tools": "[{}]"},
        {"tools": "{}"},
        {"tools": "nonsense"},
    ],
)
def test_hermes_leaves_out_a_row_of_no_known_shape(changes):
    assert export_row(PLAIN | changes) is None


@pytest.mark.parametrize("call_id", [None, 7, ["x"]])
def test_hermes_takes_ids_of_any_type(call_id):
    turns = [
        {"from": "gpt", "value": "<think>r</think> x",
         "tool_calls": [{"id": call_id, "function": {"name": "t", "arguments": {"a": 1}}}]},
        {"from": "tool", "value": "out", "tool_call_id": call_id},
    ]  # fmt: skip
    exported = export_row(foreign_row("p", conversations=turns))
    assert values(exported, "gpt") == [
        '<think>\nr\n</think>\nx\n<tool_call>\n{"name": "t", "arguments": {"a": 1}}\n</tool_call>'
    ]


# ── and back ──────────────────────────────────────────────────────────────────────────────────────────────────────

hostile_text = st.lists(
    st.one_of(
        st.sampled_from(
            [f"{opening}{tag}{closing}" for tag in TAGS for opening in ("<", "</", "&lt;", "&amp;lt;/", "\\u003c")
             for closing in (">", "", ">\n")]
            + ["\n", "<", "&", "&amp;", "amp;", "\\", '"', "\x00", "\r", "\u2028", "é", "😀", '{"a": 1}', "</think>\n",
               "\n</think>\n", "\n<tool_call>\n", '"}}\n</tool_call>', "Example:\n", "[1]", "null", "ſ", "<tooL_Call>"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    ),
    max_size=6,
).map("".join)  # fmt: skip
json_value = st.recursive(
    st.one_of(hostile_text, st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile_text, inner, max_size=3),
    max_leaves=6,
)
json_object = st.dictionaries(hostile_text, json_value, max_size=3)


def finite(value):
    """JSON as orjson writes it has no infinities."""
    return orjson.dumps(value).decode()


arguments = st.one_of(json_object.map(finite), json_object.map(lambda v: json.dumps(json.loads(finite(v)), indent=1)))
result_text = st.one_of(hostile_text, json_value.map(finite), json_object.map(finite), json_object.map(json.dumps))


@st.composite
def assistant_turn(draw, number):
    """What a model said, read as the client reads it; its calls and the results of the first of them."""
    reasoning, content = split_reasoning({"content": draw(hostile_text), "reasoning": draw(hostile_text)})
    drawn = draw(st.lists(st.tuples(hostile_text, arguments), max_size=3))
    calls = [ToolCall(f"{number}-{n}{name}", name, text) for n, (name, text) in enumerate(drawn)]
    answered = calls[: draw(st.integers(0, len(calls)))]
    results = [Message("tool", draw(result_text), tool_call_id=call.id, name=call.name) for call in answered]
    return [Message("assistant", content, reasoning, tuple(calls)), *results]


@st.composite
def conversation(draw):
    system = draw(hostile_text)
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", draw(hostile_text)))
    for number in range(draw(st.integers(0, 3))):
        messages += draw(assistant_turn(number))
    return messages


def comparable(saved):
    """A turn, its arguments as values."""
    calls = saved.get("tool_calls", ())
    return saved | {
        "tool_calls": [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
        ]
    }


@settings(max_examples=100, deadline=None)
@given(messages=conversation(), tools=st.lists(st.tuples(hostile_text, hostile_text, json_object), max_size=3))
def test_hermes_text_gives_back_all_that_was_said(messages, tools):
    offered = [
        {"name": name, "description": text, "parameters": json.loads(finite(schema))} for name, text, schema in tools
    ]
    row = row_of(*messages, tools=[{"type": "function", "function": tool} for tool in offered])
    exported = orjson.loads(orjson.dumps(export_row(row)))
    read = read_back(exported["conversations"])

    with_result = {message.tool_call_id for message in messages if message.role == "tool"}
    for message in messages:  # the text has no place for the id of a call without a result
        message.tool_calls = tuple(
            call if call.id in with_result else ToolCall("", call.name, call.arguments) for call in message.tool_calls
        )
    assert [comparable(turn(message)) for message in read.messages] == [comparable(turn(m)) for m in messages]
    assert list(read.tools) == sorted(offered, key=lambda tool: tool["name"])
    if not any("\n</think>\n" in message.reasoning + "\n" for message in messages):  # else the row itself is unclear
        said = [(message.reasoning, message.content) for message in messages]
        assert [(message.reasoning, message.content) for message in read.messages] == said


@given(hostile_text)
def test_escaped_text_spells_no_tag_and_gives_the_text_back(text):
    escaped = escaped_text(text)
    assert unescaped_text(escaped) == text
    assert not any(f"<{slash}{tag}>" in escaped.lower() for tag in TAGS for slash in ("", "/"))


@pytest.mark.parametrize(
    "text", ["a < b && c > d", "<b>bold</b> &lt;b&gt; &amp;", "<thinking> <tools_of>", "&lt;p>", "<"]
)
def test_other_text_is_not_touched(text):
    assert escaped_text(text) == text


@pytest.mark.parametrize(
    ("turns", "complaint"),
    [
        ([], "turn 0"),
        ([("system", "Be brief.")], "turn 0"),
        ([None, ("gpt", "hi")], "turn 1: no <think>"),
        ([None, ("gpt", "<think>\n</think>hi")], "turn 1: no line break"),
        ([None, ("gpt", "<think>\n</think>\n<tool_call>\n{}\n</tool_call>")], "turn 1: something"),
        ([None, ("tool", "hi")], "turn 1: something"),
        ([None, ("observation", "hi")], "turn 1: no turn of this format is from 'observation'"),
    ],
)
def test_text_of_another_format_is_refused(turns, complaint):
    opening = export_row(row_of())["conversations"][0]
    with pytest.raises(ValueError, match=complaint):
        read_back([opening if turn is None else {"from": turn[0], "value": turn[1]} for turn in turns])
