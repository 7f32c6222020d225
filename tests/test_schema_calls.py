"""The quirk that gets tool calls out of models whose chat template knows no tools."""

import dataclasses

import orjson
import pytest

from promptmill.config import ModelSettings
from promptmill.endpoints import Endpoint
from promptmill.quirks import quirks_for
from promptmill.quirks.base import ModelRequest
from promptmill.quirks.schema_calls import DEFAULT_MAX_TOKENS, MAX_EXAMPLES, SchemaCalls
from promptmill.records import Message, ModelReply, ToolCall, Usage
from toolsets.catalog import TOOLS, load_tool

LOCAL = ModelSettings("local", Endpoint("http://127.0.0.1:1/v1", "", frozenset({"no_tool_template"})))
OPENING = [Message("system", "Be good."), Message("user", "List the files.")]
CALL = Message("assistant", "", reasoning="I look.", tool_calls=(ToolCall("c1", "terminal", '{"command":"ls"}'),))
RESULT = Message("tool", '{"output":"a.txt"}', tool_call_id="c1", name="terminal")


def tool(name="terminal", required=("command",), **properties):
    properties = properties or {"command": {"type": "string"}, "timeout": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "Runs. Really.", "parameters": parameters}}


def changed(messages, tools, settings=LOCAL, **fields):
    request = ModelRequest(messages, tools, dict(fields))
    SchemaCalls(settings).change_request(request)
    return request


def forced(content, finish_reason="stop"):
    """The reply that the agent sees for what the model wrote under the schema."""
    request = changed(OPENING, [tool()])
    reply = ModelReply(Message("assistant", content), finish_reason, Usage(), cut=finish_reason == "length")
    return SchemaCalls(LOCAL).change_reply(reply, request)


@pytest.mark.parametrize("levels", [300, 900])
def test_a_forced_call_may_be_nested_deeply(levels):
    arguments = '{"a":' * levels + "1" + "}" * levels
    message = forced(f'{{"thought": "t", "tool": "terminal", "arguments": {arguments}}}').message
    assert [call.arguments for call in message.tool_calls] in ([arguments], [])


def call_schemas(request):
    return request.fields["response_format"]["json_schema"]["schema"]["anyOf"]


def argument_schema(schema):
    (variant,) = call_schemas(changed(OPENING, [tool(required=("x",), x=schema)]))
    return variant["properties"]["arguments"]["properties"]["x"]


def test_it_applies_to_endpoints_whose_template_knows_no_tools():
    assert SchemaCalls in [type(quirk) for quirk in quirks_for(LOCAL)]
    assert not SchemaCalls.applies(dataclasses.replace(LOCAL, endpoint=Endpoint("http://127.0.0.1:1/v1", "")))


def test_a_prompt_is_met_by_a_call_that_a_schema_forces():
    request = changed(OPENING, [tool("terminal"), tool("look", required=())])
    assert not request.tools
    terminal, look = call_schemas(request)
    assert terminal["required"] == ["thought", "tool", "arguments"]
    assert terminal["properties"]["tool"] == {"const": "terminal"}
    assert list(terminal["properties"]["arguments"]["properties"]) == ["command"]
    assert look["properties"]["arguments"]["properties"] == {}


def test_the_tools_and_an_example_of_each_precede_the_conversation():
    request = changed(OPENING, [tool("terminal"), tool("look", required=())])
    system, *examples, prompt = request.messages
    assert system.content.startswith("Be good.")
    assert "- terminal(command): Runs." in system.content
    assert "- look(): Runs." in system.content
    assert prompt == OPENING[-1]
    assert [orjson.loads(m.content)["tool"] for m in examples if m.role == "assistant"] == ["look", "terminal"]
    assert examples[-2].content == "Use terminal with command `alpha`."


def test_there_are_not_more_examples_than_a_small_context_holds():
    request = changed(OPENING, [tool(f"tool_{number}") for number in range(30)])
    assert len(request.messages) == 1 + 2 * MAX_EXAMPLES + 1
    assert len(call_schemas(request)) == 30


def test_a_conversation_without_a_system_message_gets_one():
    assert [m.role for m in changed(OPENING[1:], [tool()]).messages] == ["system", "user", "assistant", "user"]


def test_a_result_is_met_by_plain_chat():
    request = changed([*OPENING, CALL, RESULT], [tool()])
    assert not request.tools
    assert "response_format" not in request.fields
    assert request.messages == [
        *OPENING,
        Message("assistant", "I look."),
        Message("user", 'The tool terminal gave: {"output":"a.txt"}'),
    ]


def test_a_call_without_a_thought_is_told_as_what_it_was():
    bare = dataclasses.replace(CALL, reasoning="")
    assert changed([*OPENING, bare, RESULT], [tool()]).messages[2].content == 'I use terminal with {"command":"ls"}.'


def test_several_results_are_one_message_so_that_roles_alternate():
    request = changed([*OPENING, CALL, RESULT, RESULT], [tool()])
    assert [m.role for m in request.messages] == ["system", "user", "assistant", "user"]


def test_the_next_prompt_after_an_answer_is_met_by_a_call_again():
    messages = [*OPENING, CALL, RESULT, Message("assistant", "There is a.txt."), Message("user", "Read it.")]
    assert "response_format" in changed(messages, [tool()]).fields


def test_no_message_of_the_conversation_is_changed():
    before = [dataclasses.replace(message) for message in (*OPENING, CALL, RESULT)]
    messages = [*OPENING, CALL, RESULT]
    changed(messages, [tool()])
    assert messages == before


def test_without_tools_it_is_plain_chat():
    request = changed(OPENING, [])
    assert "response_format" not in request.fields
    assert list(request.messages) == OPENING


def test_what_the_user_chose_wins_over_the_defaults():
    defaults = changed(OPENING, [tool()]).fields
    assert (defaults["temperature"], defaults["max_tokens"]) == (0, DEFAULT_MAX_TOKENS)
    chosen = changed(OPENING, [tool()], temperature=0.7, max_tokens=9).fields
    assert (chosen["temperature"], chosen["max_tokens"]) == (0.7, 9)


def test_only_the_demonstration_models_answer_ends_with_its_first_paragraph():
    conversation = [*OPENING, CALL, RESULT]
    other = dataclasses.replace(LOCAL, model="local:model.gguf")
    assert changed(conversation, [tool()]).fields["stop"] == ["\n\n"]
    assert "stop" not in changed(conversation, [tool()], settings=other).fields
    assert "stop" not in changed(OPENING, [tool()]).fields


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 600}, {"type": "integer"}),
        ({"type": ["null", "boolean"]}, {"type": "boolean"}),
        ({"type": "string", "enum": ["a", "b"]}, {"enum": ["a", "b"]}),
        ({"type": "object"}, {"type": "object"}),
        ({}, {"type": "string", "maxLength": 1000}),
        ({"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 1000}),
        (
            {"type": "array", "items": {"type": "number", "minimum": 0}},
            {"type": "array", "items": {"type": "number"}, "maxItems": 10},
        ),
    ],
)
def test_a_parameter_is_said_in_words_that_the_grammar_knows(schema, simple):
    assert argument_schema(schema) == simple


def test_an_object_parameter_keeps_its_required_fields():
    fields = {"a": {"type": "integer", "minimum": 1}, "b": {"type": "string"}}
    schema = argument_schema({"type": "object", "properties": fields, "required": ["a"]})
    assert schema["properties"] == {"a": {"type": "integer"}}
    assert schema["required"] == ["a"]


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_every_tool_of_the_catalog_can_be_forced_and_has_an_example_that_fits(name):
    schema = load_tool(name).schema()
    request = changed(OPENING, [schema])
    (variant,) = call_schemas(request)
    example = orjson.loads(request.messages[-2].content)
    assert list(variant["properties"]["arguments"]["properties"]) == list(example["arguments"])
    assert list(example["arguments"]) == schema["function"]["parameters"]["required"]


def test_the_forced_object_becomes_reasoning_and_a_tool_call():
    reply = forced('{"thought": " I list. ", "tool": "terminal", "arguments": {"command": "ls"}}')
    (call,) = reply.message.tool_calls
    assert (reply.message.content, reply.message.reasoning) == ("", "I list.")
    assert (call.name, call.arguments) == ("terminal", '{"command":"ls"}')
    assert call.id.startswith("call_")
    assert (reply.finish_reason, reply.cut) == ("tool_calls", False)


def test_a_whole_object_counts_although_the_token_limit_ended_the_reply():
    reply = forced('{"thought": "t", "tool": "terminal", "arguments": {"command": "ls"}}', finish_reason="length")
    assert reply.message.tool_calls
    assert not reply.cut


@pytest.mark.parametrize("content", ['{"thought": "I l', "", "[]", '{"thought": "t", "tool": "terminal"}'])
def test_a_call_that_is_not_whole_stays_cut(content):
    reply = forced(content, finish_reason="length")
    assert (reply.message.content, reply.message.tool_calls, reply.cut) == (content, (), True)


def test_a_plain_answer_stays_what_it_is_even_when_it_looks_like_a_call():
    request = changed([*OPENING, CALL, RESULT], [tool()])
    text = '{"thought": "t", "tool": "terminal", "arguments": {}}'
    reply = ModelReply(Message("assistant", text), "stop", Usage())
    assert SchemaCalls(LOCAL).change_reply(reply, request) is reply
