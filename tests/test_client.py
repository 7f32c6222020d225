"""One model call over real HTTP: what is sent, what is retried, and what each failure means."""

import asyncio
import random
from dataclasses import replace

import pytest

from promptmill.client import ModelClient
from promptmill.config import Reasoning, Routing
from promptmill.errors import (
    ContextFullError,
    EndpointError,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)
from promptmill.failures import RetryPolicy
from promptmill.records import Message, ToolCall, Usage
from tests.fakes.model_server import (
    HALF_A_REPLY,
    ScriptedServer,
    call,
    drop,
    fail,
    in_order,
    raw,
    say,
)
from tests.rows import make_settings

QUICK = RetryPolicy(max_attempts=4, max_refusals=4, first_backoff_s=0.001, max_backoff_s=0.002)
HELLO = [Message("system", "be brief"), Message("user", "hello")]
TOOL = {"type": "function", "function": {"name": "terminal", "parameters": {"type": "object"}}}


async def complete(server, messages=HELLO, tools=(), *, base_url="", retries=QUICK, **settings):
    client = ModelClient(make_settings(base_url or server.base_url, **settings), retries=retries)
    try:
        return await client.complete(messages, tools)
    finally:
        await client.close()


async def body_sent(server, **settings):
    await complete(server, **settings)
    return dict(server.requests[-1].body)


@pytest.fixture
async def server(start_server):
    return await start_server(lambda request: say("hi", reasoning="polite"))


@pytest.fixture
def proxied(server, monkeypatch):
    """The server, reached as whatever public host a request names."""
    monkeypatch.setenv("HTTP_PROXY", server.proxy_url)
    return server


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_plain_request_is_the_model_and_the_messages(server):
    reply = await complete(server)
    (request,) = server.requests
    assert (request.method, request.path, request.api_key) == ("POST", "/v1/chat/completions", "test-key")
    assert request.headers["content-type"] == "application/json"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert request.body == {"model": "test/model", "messages": messages}
    assert (reply.message.content, reply.message.reasoning, reply.finish_reason) == ("hi", "polite", "stop")
    assert reply.usage == Usage(100, 10, 0, 0, 1)


async def test_a_conversation_with_tools_is_sent_as_the_api_wants_it(server):
    details = [{"type": "reasoning.encrypted", "data": "x"}]
    asked = Message(
        "assistant", "", "why", (ToolCall("a", "terminal", '{"b":  1}'), ToolCall("b", "patch", "{broken")),
        echo={"reasoning_details": details},
    )  # fmt: skip
    answer = Message("tool", "é\n", tool_call_id="a", name="terminal")
    await complete(server, [*HELLO, asked, answer], [TOOL])
    body = server.requests[0].body
    assert body["tools"] == [TOOL]
    assert body["messages"][2:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "terminal", "arguments": '{"b":  1}'}},
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "patch", "arguments": '{"invalid_arguments":"{broken"}'},
                },
            ],
            "reasoning_details": details,
        },
        {"role": "tool", "content": "é\n", "tool_call_id": "a", "name": "terminal"},
    ]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {}),
        ({"max_tokens": 7, "temperature": 0.0, "top_p": 0.5}, {"max_tokens": 7, "temperature": 0.0, "top_p": 0.5}),
        ({"model": "openai/gpt-5-mini", "max_tokens": 7}, {"max_completion_tokens": 7}),
        ({"model": "o3", "max_tokens": 7}, {"max_completion_tokens": 7}),
        ({"model": "olmo3", "max_tokens": 7}, {"max_tokens": 7}),
        (
            {"reasoning": Reasoning(enabled=True, effort="high")},
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        (
            {"reasoning": Reasoning(enabled=False)},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        ({"routing": Routing(only=("a",))}, {}),
    ],
)
async def test_fields_of_a_server_of_ones_own(server, settings, fields):
    body = await body_sent(server, **settings)
    assert {name: body[name] for name in body.keys() - {"model", "messages"}} == fields


async def test_openai_itself_gets_max_completion_tokens(proxied):
    body = await body_sent(proxied, base_url="http://api.openai.com/v1", model="gpt-4o", max_tokens=7)
    assert proxied.requests[0].host == "api.openai.com"
    assert body.keys() == {"model", "messages", "max_completion_tokens"}
    assert body["max_completion_tokens"] == 7


MEDIUM = {"enabled": True, "effort": "medium"}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"reasoning": MEDIUM}),
        ({"reasoning": Reasoning(enabled=True, effort="xhigh")}, {"reasoning": {"enabled": True, "effort": "xhigh"}}),
        ({"reasoning": Reasoning(enabled=False)}, {"reasoning": {"enabled": False}}),
        ({"max_tokens": 7}, {"reasoning": MEDIUM, "max_tokens": 7}),
        ({"routing": Routing(only=("a", "b"))}, {"reasoning": MEDIUM, "provider": {"only": ["a", "b"]}}),
        (
            {"routing": Routing(ignore=("a",), order=("b", "c"), sort="price")},
            {"reasoning": MEDIUM, "provider": {"ignore": ["a"], "order": ["b", "c"], "sort": "price"}},
        ),
    ],
)
async def test_fields_of_openrouter(proxied, settings, fields):
    body = await body_sent(proxied, base_url="http://openrouter.ai/api/v1", **settings)
    request = proxied.requests[0]
    assert (request.host, request.path) == ("openrouter.ai", "/api/v1/chat/completions")
    assert {name: body[name] for name in body.keys() - {"model", "messages"}} == fields


async def test_a_look_alike_of_openrouter_is_not_sent_its_fields(proxied):
    body = await body_sent(proxied, base_url="http://notopenrouter.ai/v1", reasoning=Reasoning(True, "low"))
    assert body["reasoning_effort"] == "low"
    assert "reasoning" not in body


async def test_a_server_on_this_machine_is_reached_without_the_environments_proxy(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    await complete(server)
    assert len(server.requests) == 1


async def test_nothing_from_the_environment_is_sent_to_a_foreign_host(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "secret-admin-key")
    monkeypatch.setenv("OPENAI_ORG_ID", "secret-organisation")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "secret-project")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Extra: secret-header\nAuthorization: Bearer secret-token")
    await complete(server)
    (request,) = server.requests
    assert request.api_key == "test-key"
    assert "secret" not in str(request)


async def test_a_redirect_to_another_host_does_not_take_the_key_along(server, start_server):
    stranger = await start_server(lambda request: say("hi"))
    server.script = lambda request: fail(307, headers={"Location": f"{stranger.base_url}/chat/completions"})
    await complete(server)
    (request,) = stranger.requests
    assert "test-key" not in str(request)


async def test_a_message_is_encoded_once_however_often_it_is_sent(server):
    await complete(server)
    first = [message.encoded for message in HELLO]
    await complete(server)
    assert all(message.encoded is encoded for message, encoded in zip(HELLO, first, strict=True))
    assert server.bodies[0] == server.bodies[1]


# ── what is retried ───────────────────────────────────────────────────────────────────────────────────────

PASSES = {
    "408": fail(408), "409": fail(409), "425": fail(425), "429": fail(429), "500": fail(500), "502": fail(502),
    "503": fail(503), "504": fail(504), "529": fail(529),
    "dropped": drop(), "dropped within the body": drop(HALF_A_REPLY),
    "dropped within an error": drop(b"HTTP/1.1 500 Oops\r\nContent-Length: 1000\r\n\r\n{"),
    "bad gzip": replace(raw("x"), headers={"Content-Encoding": "gzip"}),
    "no HTTP": drop(b"SSH-2.0-OpenSSH_9\r\n"),
    "no JSON": raw("<html>Bad gateway</html>"), "empty body": raw(""), "bad UTF-8": raw(b'"\xff"'),
    "no completion": raw("[]"), "error in a 200": raw('{"error": {"message": "overloaded"}}'),
    "empty reply": say(""), "only reasoning": say(None, reasoning="hm"), "only blanks": say(" \n"),
}  # fmt: skip


@pytest.mark.parametrize("failure", PASSES.values(), ids=PASSES)
async def test_what_may_pass_is_tried_again(server, failure):
    server.script = in_order(failure, failure, failure, say("hi"))
    assert (await complete(server)).message.content == "hi"
    assert len(server.requests) == 4
    assert all(body == server.bodies[0] for body in server.bodies)


@pytest.mark.parametrize("name", [name for name in PASSES if not name.startswith(("empty reply", "only"))])
async def test_what_does_not_pass_is_transient_after_all_attempts(server, name):
    server.script = lambda request: PASSES[name]
    with pytest.raises(TransientModelError, match=r"\(after 4 attempts\)"):
        await complete(server)
    assert len(server.requests) == 4


@pytest.mark.parametrize("name", ["empty reply", "only reasoning", "only blanks"])
async def test_a_model_that_never_answers_has_refused(server, name):
    server.script = lambda request: PASSES[name]
    with pytest.raises(RefusedError, match="neither text nor a tool call"):
        await complete(server)
    assert len(server.requests) == 4


async def test_an_endpoint_at_which_nobody_ever_listened_stops_the_run():
    async with ScriptedServer() as gone:
        pass
    with pytest.raises(EndpointError, match="no answer from http://127.0.0.1.*start the server or mend --base_url"):
        await complete(gone)


async def test_an_endpoint_that_has_answered_and_is_gone_fails_the_sample_alone():
    async with ScriptedServer(lambda request: say("hi")) as server:
        client = ModelClient(make_settings(server.base_url), retries=QUICK)
        await client.complete([Message("user", "hello")], ())
    try:
        with pytest.raises(TransientModelError, match="no answer from"):
            await client.complete([Message("user", "hello")], ())
    finally:
        await client.close()


async def test_a_403_after_a_success_is_about_the_prompt(server):
    server.script = in_order(say("hi"), fail(403, "blocked by the firewall"))
    client = ModelClient(make_settings(server.base_url), retries=QUICK)
    try:
        await client.complete([Message("user", "hello")], ())
        with pytest.raises(RefusedError, match="answered 403: blocked by the firewall"):
            await client.complete([Message("user", "hello")], ())
    finally:
        await client.close()


async def test_the_failure_says_what_the_endpoint_said(server):
    server.script = lambda request: fail(503, "no capacity\n  left")
    with pytest.raises(TransientModelError, match="answered 503: no capacity left"):
        await complete(server)


SLOW = RetryPolicy(max_attempts=2, first_backoff_s=600, max_backoff_s=600)


@pytest.mark.parametrize("seconds", ["0", "0.01", "-3"])
async def test_the_wait_is_what_the_server_asks_for(server, seconds):
    server.script = in_order(fail(429, headers={"Retry-After": seconds}), say("hi"))
    async with asyncio.timeout(10):  # left to itself it would wait for 300 s
        await complete(server, retries=SLOW)


async def test_a_server_that_asks_for_a_day_does_not_get_it(server):
    server.script = in_order(fail(429, headers={"Retry-After": "86400"}), say("hi"))
    async with asyncio.timeout(10):
        await complete(server, retries=replace(QUICK, max_retry_after_s=0.01))


def test_the_wait_doubles_up_to_a_limit_and_half_of_it_is_drawn():
    policy = RetryPolicy(first_backoff_s=1, max_backoff_s=5)
    rng = random.Random(0)
    for attempt, ceiling in ((1, 1), (2, 2), (3, 4), (4, 5), (50, 5)):
        waits = [policy.backoff_s(attempt, rng) for _ in range(50)]
        assert ceiling / 2 <= min(waits) < max(waits) <= ceiling


@pytest.mark.parametrize("header", ["soon", "nan", "inf", ""])
async def test_a_wait_that_is_no_number_is_ignored(server, header):
    server.script = in_order(fail(429, headers={"Retry-After": header}), say("hi"))
    await complete(server)
    assert len(server.requests) == 2


# ── what each failure means ───────────────────────────────────────────────────────────────────────────────

FULL = "This model's maximum context length is 8192 tokens"


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (fail(401, "bad key"), EndpointError),
        (fail(402, "no credits"), EndpointError),
        (fail(403, "not allowed"), EndpointError),
        (fail(404, "no such model"), EndpointError),
        (fail(429, "You exceeded your current quota", code="insufficient_quota"), EndpointError),
        (fail(403, "flagged", metadata={"reasons": ["violence"], "flagged_input": "..."}), RefusedError),
        (say("half an answ", finish_reason="content_filter"), RefusedError),
        (say(None, finish_reason="content_filter"), RefusedError),
        (fail(400, FULL), ContextFullError),
        (fail(400, "the request exceeds the available context size"), ContextFullError),
        (fail(400, "Prompt is too long"), ContextFullError),
        (fail(413, "large"), ContextFullError),
        (fail(400, "temperature must be a number"), RejectedRequestError),
        (fail(422, "no such field"), RejectedRequestError),
        (raw("Bad Request", status=400), RejectedRequestError),
    ],
)
async def test_what_cannot_pass_is_asked_once(server, failure, error):
    server.script = lambda request: failure
    with pytest.raises(error):
        await complete(server)
    assert len(server.requests) == 1


async def test_refused_credentials_say_what_to_do_and_never_show_the_key(server):
    server.script = lambda request: fail(401, "bad key")
    with pytest.raises(EndpointError, match="answered 401: bad key; check the key") as refusal:
        await complete(server)
    assert "test-key" not in str(refusal.value)
    server.script = lambda request: fail(404, "no such model")
    with pytest.raises(EndpointError, match="check --model=test/model and --base_url"):
        await complete(server)


async def test_a_cut_reply_is_an_answer_even_when_it_is_empty(server):
    server.script = lambda request: say("", finish_reason="length")
    assert (await complete(server)).cut


async def test_a_call_comes_back_as_the_model_wrote_it(server):
    server.script = lambda request: call("terminal", '{"command":  "ls"}', id="x", reasoning="look", usage=None)
    reply = await complete(server, tools=[TOOL])
    assert reply.message.tool_calls == (ToolCall("x", "terminal", '{"command":  "ls"}'),)
    assert (reply.message.content, reply.message.reasoning) == ("", "look")
    assert reply.usage == Usage()


async def test_many_calls_share_one_client(server):
    server.delay_s = 0.05
    client = ModelClient(make_settings(server.base_url), max_connections=64)
    await asyncio.gather(*(client.complete(HELLO, ()) for _ in range(64)))
    await client.close()
    assert server.max_in_flight > 32


async def test_a_cancelled_call_ends_at_once(server):
    server.delay_s = 60
    calling = asyncio.create_task(complete(server))
    while not server.requests:
        await asyncio.sleep(0.001)
    calling.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await calling
