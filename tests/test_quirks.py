"""The dialects of reasoning: what each family of endpoints is sent, what goes back, and what is said of the rest."""

import re

import pytest

from promptmill.config import ModelSettings, Reasoning, Routing
from promptmill.endpoints import Endpoint
from promptmill.quirks import DIALECTS, QUIRKS, quirks_for
from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import ORDER, Dialect, nearest_effort
from promptmill.records import Message, ModelReply, ToolCall, Usage
from promptmill.streaming import stream_fields

HOSTS = {
    "openrouter": "https://openrouter.ai/api/v1", "openai": "https://api.openai.com/v1",
    "azure": "https://mine.openai.azure.com/v1", "deepseek": "https://api.deepseek.com",
    "qwen": "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "anthropic": "https://api.anthropic.com/v1",
    "gemini": "https://generativelanguage.googleapis.com/v1beta/openai", "mistral": "https://api.mistral.ai/v1",
    "xai": "https://api.x.ai/v1", "groq": "https://api.groq.com/openai/v1", "moonshot": "https://api.moonshot.ai/v1",
    "zai": "https://api.z.ai/api/paas/v4", "own": "http://127.0.0.1:8000/v1", "lan": "http://gpu-box:8000/v1",
    "other": "https://models.example.org/v1",
}  # fmt: skip
OFF, ON = Reasoning(enabled=False), Reasoning(enabled=True)
TEMPLATE_ON = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
TEMPLATE_OFF = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}


def effort(level):
    return Reasoning(enabled=True, effort=level)


def settings_for(where, model, reasoning=None, **rest):
    return ModelSettings(model, Endpoint(HOSTS[where], "k"), reasoning=reasoning or Reasoning(), **rest)


def sent(settings, **fields):
    """The fields of a request, those given here aside."""
    request = ModelRequest([Message("user", "hi")], (), dict(fields))
    for quirk in quirks_for(settings):
        quirk.change_request(request)
    return {name: value for name, value in request.fields.items() if fields.get(name) != value}


def notes(settings):
    return [note for quirk in quirks_for(settings) for note in quirk.notes()]


def level(name):
    return {"reasoning_effort": name}


def switch(name):
    return {"thinking": {"type": name}}


SENT = [
    ("openai", "gpt-5.2", effort("xhigh"), level("xhigh"), ""),
    ("openai", "gpt-5.2", effort("ultra"), level("xhigh"), "is sent as 'xhigh'"),
    ("openai", "gpt-5.2", OFF, level("none"), ""),
    ("openai", "gpt-5.1", effort("minimal"), level("low"), "is sent as 'low'"),
    ("openai", "gpt-5-mini", effort("minimal"), level("minimal"), ""),
    ("openai", "gpt-5-mini", OFF, level("minimal"), "--reasoning_disabled is sent as 'minimal'"),
    ("openai", "o3", effort("xhigh"), level("high"), "knows low, medium, high"),
    ("openai", "gpt-4o", effort("high"), {}, "gpt-4o at api.openai.com has no control of reasoning"),
    ("openai", "gpt-4o", OFF, {}, "--reasoning_disabled is not sent"),
    ("azure", "gpt-5-mini", effort("low"), level("low"), ""),
    ("deepseek", "deepseek-v4-pro", effort("ultra"), {**switch("enabled"), **level("ultra")}, ""),
    ("deepseek", "deepseek-v4-pro", OFF, switch("disabled"), ""),
    ("qwen", "qwen-plus", effort("low"), {"enable_thinking": True}, "knows on and off only; .*--stream"),
    ("qwen", "qwen-plus", OFF, {"enable_thinking": False}, ""),
    ("anthropic", "claude-sonnet-4-5", effort("low"), {"thinking": {"type": "enabled", "budget_tokens": 2048}},
     "a budget of 2048 tokens; .* does not return the text"),
    ("anthropic", "claude-opus-4-7", effort("low"), {"thinking": {"type": "adaptive"}}, "'adaptive'"),
    ("anthropic", "claude-sonnet-4-20250514", OFF, switch("disabled"), ""),
    ("gemini", "gemini-2.5-flash", OFF, level("none"), ""),
    ("gemini", "gemini-3-pro-preview", OFF, level("low"), "is sent as 'low'"),
    ("gemini", "gemini-3-pro-preview", effort("high"), level("high"), ""),
    ("mistral", "mistral-small-latest", effort("low"), level("high"), "is sent as 'high'"),
    ("mistral", "mistral-small-latest", OFF, level("none"), ""),
    ("mistral", "magistral-medium-latest", effort("low"), {}, "has no control"),
    ("xai", "grok-4.3", OFF, level("none"), ""),
    ("xai", "grok-4.7", effort("max"), level("xhigh"), "is sent as 'xhigh'"),
    ("xai", "grok-3-mini", effort("medium"), level("high"), "is sent as 'high'"),
    ("xai", "grok-code-fast-1", effort("high"), {}, "has no control"),
    ("groq", "openai/gpt-oss-120b", effort("high"), level("high"), ""),
    ("groq", "qwen/qwen3-32b", OFF, level("none"), ""),
    ("groq", "qwen/qwen3-32b", effort("high"), level("default"), "knows on and off only"),
    ("groq", "llama-3.3-70b-versatile", effort("high"), {}, "has no control"),
    ("moonshot", "kimi-k3", effort("ultra"), level("max"), "is sent as 'max'"),
    ("moonshot", "kimi-k3", OFF, level("low"), "is sent as 'low'"),
    ("moonshot", "kimi-k2.6", OFF, switch("disabled"), ""),
    ("moonshot", "kimi-k2.6", effort("high"), switch("enabled"), "knows on and off only"),
    ("moonshot", "kimi-k2.7-code", OFF, {}, "has no control"),
    ("zai", "glm-5", effort("high"), switch("enabled"), "knows on and off only"),
    ("zai", "glm-5", OFF, switch("disabled"), ""),
    ("own", "test/model", ON, TEMPLATE_ON, ""),
    ("own", "test/model", OFF, TEMPLATE_OFF, ""),
    ("own", "test/model", effort("high"), {**TEMPLATE_ON, **level("high")}, ""),
    ("lan", "test/model", effort("ultra"), {**TEMPLATE_ON, **level("high")}, "is sent as 'high': gpu-box"),
    ("own", "openai/gpt-oss-20b", effort("low"), {"chat_template_kwargs": level("low"), **level("low")}, ""),
    ("own", "openai/gpt-oss-20b", OFF, {"chat_template_kwargs": level("low"), **level("low")},
     "gpt-oss cannot be switched off"),
    ("other", "Qwen/Qwen3-32B", OFF, TEMPLATE_OFF, ""),
    ("other", "some-model", effort("ultra"), level("ultra"), "whether some-model at models.example.org heeds it"),
    ("other", "some-model", OFF, level("none"), "whether some-model"),
    ("openrouter", "any/model", effort("max"), {"reasoning": {"enabled": True, "effort": "max"}}, ""),
    ("openrouter", "any/model", OFF, {"reasoning": {"enabled": False}}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("where", "model", "reasoning", "fields", "said"), SENT)
def test_reasoning_is_sent_as_the_endpoint_knows_it_and_the_difference_is_said(where, model, reasoning, fields, said):
    settings = settings_for(where, model, reasoning)
    assert sent(settings) == fields
    told = [note for note in notes(settings) if "returns no text" not in note]
    assert len(told) == bool(said)
    if said:
        assert "--reasoning" in told[0] or "--stream" in told[0]
        assert re.search(said, told[0])


@pytest.mark.parametrize("where", sorted(HOSTS))
def test_nothing_is_sent_where_nothing_was_asked_for(where):
    settings = settings_for(where, "m")
    expected = {"reasoning": {"enabled": True, "effort": "medium"}} if where == "openrouter" else {}
    assert sent(settings) == expected
    assert notes(settings) == []


@pytest.mark.parametrize("name", sorted({**DIALECTS, **QUIRKS}))
def test_every_quirk_says_only_sentences_and_asks_for_nothing_new(name):
    settings = [settings_for(where, model, reasoning) for where, model, reasoning, *_ in SENT]
    for quirk in (quirk for one in settings for quirk in quirks_for(one)):
        assert all(isinstance(note, str) and note for note in quirk.notes())
        if isinstance(quirk, Dialect):
            assert {type(other) for other in quirks_for(quirk.settings) if isinstance(other, Dialect)} == {type(quirk)}


@pytest.mark.parametrize(
    ("reasoning", "known", "expected"),
    [
        (Reasoning(), ORDER, ""), (effort("high"), (), ""), (OFF, ("none", "high"), "none"), (OFF, ("low",), "low"),
        (ON, ("low", "medium"), "medium"), (effort("minimal"), ("none", "low"), "low"),
        (effort("medium"), ("low", "high"), "high"), (effort("ultra"), ("low", "high"), "high"),
    ],
)  # fmt: skip
def test_the_nearest_level_is_taken_the_stronger_of_two_and_never_off(reasoning, known, expected):
    assert nearest_effort(reasoning, known) == expected


def test_anthropic_thinks_within_the_reply_or_not_at_all():
    def asked(max_tokens):
        return settings_for("anthropic", "claude-sonnet-4-5", effort("high"), max_tokens=max_tokens)

    assert sent(asked(5000))["thinking"]["budget_tokens"] == 4999
    assert "thinking" not in sent(asked(1000))
    assert "needs --max_tokens above 1024" in notes(asked(1000))[0]


def test_models_that_keep_their_reasoning_to_themselves_are_named():
    assert "--keep_no_reasoning" in notes(settings_for("openai", "gpt-5.2", effort("high")))[0]
    assert notes(settings_for("openai", "gpt-4o")) == []


def test_the_demonstration_model_has_nothing_to_control():
    settings = ModelSettings("local", Endpoint("", "k"), reasoning=effort("high"))
    assert sent(settings) == {}
    assert "demonstration model has no reasoning" in notes(settings)[0]


@pytest.mark.parametrize(
    ("where", "model", "field"),
    [
        ("openai", "gpt-4o", "max_completion_tokens"), ("openai", "gpt-5.2", "max_completion_tokens"),
        ("azure", "gpt-5-mini", "max_completion_tokens"), ("other", "openai/o3", "max_completion_tokens"),
        ("own", "openai/gpt-5-mini", "max_completion_tokens"), ("own", "test/model", "max_tokens"),
        ("openrouter", "openai/gpt-5", "max_tokens"), ("deepseek", "deepseek-v4-pro", "max_tokens"),
        ("own", "openai/gpt-oss-20b", "max_tokens"),
    ],
)  # fmt: skip
def test_the_token_limit_has_the_name_that_the_model_takes(where, model, field):
    request = ModelRequest([], (), {"max_tokens": 7})
    for quirk in quirks_for(settings_for(where, model)):
        quirk.change_request(request)
    limits = {name: value for name, value in request.fields.items() if name.endswith("_tokens")}
    assert limits == {field: 7}


def test_mistral_is_not_sent_a_field_that_it_refuses():
    settings = settings_for("mistral", "mistral-small-latest", stream=True)
    request = ModelRequest([], (), stream_fields(settings))
    for quirk in quirks_for(settings):
        quirk.change_request(request)
    assert request.fields == {"stream": True}


def test_routing_elsewhere_than_on_openrouter_is_said_to_be_left_out():
    settings = settings_for("own", "m", routing=Routing(only=("a",)))
    assert sent(settings) == {}
    assert "The provider flags are not sent: 127.0.0.1 is not OpenRouter" in notes(settings)[0]


# ── what goes back ────────────────────────────────────────────────────────────────────────────────────────

CALLS = (ToolCall("a", "t", "{}"),)


def echoed(where, model="m", *, calls=CALLS, reasoning="why", echo=None, field="", asked=None):
    message = Message("assistant", "", reasoning, calls, echo=echo or {})
    reply = ModelReply(message, "stop", Usage(), reasoning_field=field)
    settings = settings_for(where, model, asked)
    for quirk in reversed(quirks_for(settings)):
        reply = quirk.change_reply(reply, ModelRequest([], ()))
    return dict(reply.message.echo)


DETAILS = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}


@pytest.mark.parametrize(
    ("given", "echo"),
    [
        ({"where": "openrouter", "echo": DETAILS}, DETAILS),
        ({"where": "openrouter"}, {"reasoning": "why"}),
        ({"where": "openrouter", "calls": ()}, {}),
        ({"where": "deepseek"}, {"reasoning_content": "why"}),
        ({"where": "deepseek", "reasoning": ""}, {"reasoning_content": ""}),
        ({"where": "deepseek", "asked": OFF}, {}),
        ({"where": "moonshot"}, {"reasoning_content": "why"}),
        ({"where": "zai"}, {"reasoning_content": "why"}),
        ({"where": "own"}, {"reasoning_content": "why"}),
        ({"where": "own", "field": "reasoning"}, {"reasoning": "why"}),
        ({"where": "own", "field": "reasoning_content"}, {"reasoning_content": "why"}),
        ({"where": "own", "reasoning": ""}, {}),
        ({"where": "own", "calls": ()}, {}),
        ({"where": "other"}, {}),
        ({"where": "openai"}, {}),
        ({"where": "mistral", "echo": {"content": [1]}}, {"content": [1]}),
    ],
)
def test_reasoning_goes_back_in_the_form_the_endpoint_needs(given, echo):
    assert echoed(**given) == echo
