"""One model call over real HTTP: what is sent, what is retried, and what each failure means."""

import asyncio
import gzip
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import orjson
import pytest

from promptmill import streaming
from promptmill.client import ModelClient
from promptmill.config import Reasoning, Routing
from promptmill.deadlines import PromptClock
from promptmill.endpoints import NO_KEY
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
    events,
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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_redirect_to_another_server_is_sent_nothing_and_stops_the_run(server, start_server, status, stream):
    stranger = await start_server(lambda request: say("hi"))
    server.script = lambda request: fail(status, headers={"Location": f"{stranger.base_url}/chat/completions"})
    with pytest.raises(EndpointError, match=rf"\({status}\) to another server, {stranger.proxy_url}; nothing was sent"):
        await complete(server, stream=stream)
    assert (server.count, stranger.count) == (1, 0)


async def test_a_redirect_to_the_same_host_without_tls_or_by_another_name_is_one_to_another_server(server):
    for goal in (f"https{server.proxy_url[4:]}/v1", server.proxy_url.replace("127.0.0.1", "localhost"), "//evil.test/"):
        server.script = lambda request, goal=goal: fail(307, headers={"Location": goal})
        with pytest.raises(EndpointError, match="to another server"):
            await complete(server)
    assert server.count == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_redirect_within_the_server_is_followed_with_all_that_was_sent(server, stream):
    def script(request):
        moved = fail(308, "x" * 100_000, headers={"Location": "/v1/new/chat/completions"})
        return say("hi") if request.path.startswith("/v1/new/") else moved

    server.script = script
    assert (await complete(server, stream=stream)).message.content == "hi"
    first, second = server.requests
    assert (second.method, second.api_key, second.body) == ("POST", "test-key", first.body)


async def test_a_server_that_redirects_for_ever_is_transient(server):
    server.script = lambda request: fail(307, headers={"Location": "/v1/chat/completions"})
    with pytest.raises(TransientModelError, match="redirects"):
        await complete(server, retries=replace(QUICK, max_attempts=1))


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


@pytest.fixture
async def gone() -> AsyncIterator[ModelClient]:
    """A client whose endpoint has answered it once, and cannot be reached any more."""
    patient = RetryPolicy(max_attempts=2, first_backoff_s=0.02, max_backoff_s=0.04, max_outage_s=0.4)
    async with ScriptedServer(lambda request: fail(500) if request.number == 1 else say("hi")) as server:
        client = ModelClient(make_settings(server.base_url, request_timeout_s=5), retries=patient)
        assert (await client.complete(HELLO, ())).message.content == "hi"
    yield client
    await client.close()


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    body = say("back").body
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def test_an_endpoint_that_has_answered_and_is_gone_is_waited_for_beyond_a_prompts_own_time(gone, caplog):
    port = int(gone.settings.endpoint.base_url.split(":")[2].removesuffix("/v1"))

    async def hold() -> str:
        async with PromptClock(0.2) as clock:
            return (await gone.complete(HELLO, (), clock)).message.content

    held = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0.3)  # the outage is the subject
    async with await asyncio.start_server(answer_once, "127.0.0.1", port):
        assert await asyncio.gather(*held) == ["back"] * 3
    (line,) = caplog.messages
    assert line == f"http://127.0.0.1:{port}/v1 does not answer; waiting up to 0.4 s"


async def test_an_endpoint_that_is_gone_for_too_long_stops_the_run(gone):
    started_s = time.monotonic()
    with pytest.raises(EndpointError, match=r"has not answered for 0\.4 s \(no answer from .*with --resume"):
        await gone.complete(HELLO, ())
    assert 0.4 <= time.monotonic() - started_s < 5


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


async def test_the_wait_is_what_the_server_asks_for(server):
    server.script = in_order(fail(429, headers={"Retry-After": "0.3"}), say("hi"))
    started_s = time.monotonic()
    await complete(server)
    assert time.monotonic() - started_s >= 0.3


@pytest.mark.parametrize("asked", ["0", "-3", "0.001", "Wed, 21 Oct 2015 07:28:00 GMT"])
@pytest.mark.parametrize("status", [429, 503])
async def test_no_wait_is_shorter_than_our_own(server, status, asked):
    server.script = in_order(*[fail(status, headers={"Retry-After": asked})] * 3, say("hi"))
    started_s = time.monotonic()
    await complete(server, retries=RetryPolicy(first_backoff_s=0.1))
    assert time.monotonic() - started_s >= (0.1 + 0.2 + 0.4) / 2


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "6"}])
async def test_the_waits_after_faults_are_part_of_the_calls_own_time(server, headers):
    server.script = lambda request: fail(500, "oops", headers=headers)
    started_s = time.monotonic()
    said = r"answered 500: oops \(after .* attempts?; --request_timeout_s=0\.5 leaves no time for another\)"
    with pytest.raises(TransientModelError, match=said):
        await complete(server, retries=RetryPolicy(max_attempts=99, first_backoff_s=0.1), request_timeout_s=0.5)
    assert time.monotonic() - started_s < 2


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


# ── replies without end ───────────────────────────────────────────────────────────────────────────────────

ServeForEver = Callable[[str, bytes], Awaitable[str]]


@pytest.fixture
async def serve_for_ever() -> AsyncIterator[ServeForEver]:
    """Starts servers whose answers never end: `base_url = await serve_for_ever(status_line_and_headers, piece)`."""
    servers: list[asyncio.Server] = []

    async def start(head: str, piece: bytes) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                writer.write(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode())
                while not writer.is_closing():
                    writer.write(piece)
                    await writer.drain()

        servers.append(await asyncio.start_server(answer, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}/v1"

    yield start
    for each in servers:
        each.close()


TWICE = replace(QUICK, max_attempts=2)
MIB = 1 << 20
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"a" * 65_000 + b'"}}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "kind", "piece"),
    [(False, "application/json", b" " * MIB), (True, "application/json", b" " * MIB),
     (True, "text/event-stream", b": wait" + b" " * 5000 + b"\n"), (True, "text/event-stream", b"data: x" * 10_000)],
    ids=["whole", "asked to stream", "comments alone", "one line"],
)  # fmt: skip
async def test_a_reply_without_end_is_read_up_to_a_bound_and_is_transient(serve_for_ever, stream, kind, piece):
    base_url = await serve_for_ever(f"200 OK\r\nContent-Type: {kind}", piece)
    with pytest.raises(TransientModelError, match=r"with more than 64 MiB, which no reply has.*\(after 2 attempts\)"):
        await complete(None, base_url=base_url, stream=stream, retries=TWICE)


async def test_an_event_of_lines_without_end_is_given_up_at_once(serve_for_ever):
    base_url = await serve_for_ever("200 OK\r\nContent-Type: text/event-stream", b"data: {\n" * 10_000)
    with pytest.raises(TransientModelError, match=r"an event of more than 1000 lines \(after 2 attempts\)"):
        await complete(None, base_url=base_url, stream=True, retries=TWICE)


async def test_a_stream_of_events_without_end_is_read_up_to_a_bound_of_its_own(serve_for_ever, monkeypatch):
    assert streaming.MAX_STREAM_BYTES == 256 * MIB
    monkeypatch.setattr(streaming, "MAX_STREAM_BYTES", 8 * MIB)
    base_url = await serve_for_ever("200 OK\r\nContent-Type: text/event-stream", EVENT)
    with pytest.raises(TransientModelError, match=r"with more than 8 MiB, which no reply has.*\(after 2 attempts\)"):
        await complete(None, base_url=base_url, stream=True, retries=TWICE)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_counts_is_a_replys_size_when_it_is_unpacked(server, stream):
    good = say("hi", reasoning="polite").body
    fits, bomb = (gzip.compress(good + b" " * (size - len(good)), 1) for size in (64 * MIB, 64 * MIB + 1))
    assert len(bomb) < MIB
    packed = {"Content-Encoding": "gzip"}
    server.script = in_order(replace(raw(bomb), headers=packed), replace(raw(fits), headers=packed))
    assert (await complete(server, stream=stream)).message.content == "hi"
    assert server.count == 2


@pytest.mark.parametrize(
    ("head", "piece", "error"),
    [
        ("401 No", b"x" * MIB, EndpointError),
        ("400 Bad", b'{"error": {"message": "' + b"x" * MIB, RejectedRequestError),
        ("500 Oops", b"x" * MIB, TransientModelError),
        ("500 Oops\r\nContent-Encoding: gzip", gzip.compress(b"x" * 20 * MIB), TransientModelError),
        ("307 Go\r\nLocation: http://127.0.0.1:9/v1", b"x" * MIB, EndpointError),
    ],
)
async def test_an_error_without_end_means_what_its_status_says(serve_for_ever, head, piece, error):
    base_url = await serve_for_ever(head, piece)
    with pytest.raises(error) as caught:
        await complete(None, base_url=base_url, retries=TWICE)
    assert head[:3] in str(caught.value)
    assert len(str(caught.value)) < 1000


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


CHARSETS = ["hex", "undefined", "idna", "punycode", "utf-7", "rot13", "no-such", "iso-8859-1"]


@pytest.mark.parametrize("charset", CHARSETS)
async def test_a_status_decides_whatever_can_be_read_of_what_comes_with_it(server, charset):
    headers = {"Content-Type": f"text/plain; charset={charset}"}
    server.script = lambda request: replace(raw(b"bad key \xe9", status=401), headers=headers)
    with pytest.raises(EndpointError, match="answered 401: bad key [\ufffdé];"):
        await complete(server)
    packed = {"Content-Encoding": "gzip"}
    server.script = lambda request: replace(raw(b"no gzip", status=401), headers=packed)
    with pytest.raises(EndpointError, match="answered 401"):
        await complete(server)
    server.script = lambda request: drop(b"HTTP/1.1 401 No\r\nContent-Length: 1000\r\n\r\nbad k")
    with pytest.raises(EndpointError, match="answered 401"):
        await complete(server)
    assert server.count == 3


async def test_an_address_that_is_wrong_is_shown_as_it_was_called(server):
    server.script = lambda request: fail(404, "no such route")
    said = f"{server.base_url}/chat/completions answered 404: no such route; check"
    with pytest.raises(EndpointError, match=re.escape(said)):
        await complete(server)


async def test_a_server_of_ones_own_that_wants_a_key_says_where_to_put_one(server):
    server.script = lambda request: fail(401, "who?")
    said = r"answered 401: who\?; no key was sent: set HOST_127_0_0_1_API_KEY in the environment, or give --api_key"
    with pytest.raises(EndpointError, match=said):
        await complete(server, api_key=NO_KEY)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_error_inside_a_200_says_so_and_one_of_overload_is_waited_for(server, stream):
    server.script = lambda request: raw('{"error": {"code": 402, "message": "no credit"}}')
    with pytest.raises(EndpointError, match="answered 200 with an error: no credit; check"):
        await complete(server, stream=stream)
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    busy = events(overloaded, done=False) if stream else raw(orjson.dumps(overloaded))
    server.script = lambda request: busy if request.number < 9 else say("hi")
    once = replace(QUICK, max_attempts=1, max_refusals=9)
    assert (await complete(server, stream=stream, retries=once)).message.content == "hi"


# ── what is too deep ──────────────────────────────────────────────────────────────────────────────────────

DEEP = b"[" * 300 + b"]" * 300


@pytest.mark.parametrize("detail", [DEEP, b'[{"index":123456789012345678901234567890}]'], ids=["deep", "large number"])
async def test_what_cannot_be_sent_back_is_left_out(server, detail):
    wanted = b'{"x":NaN,"choices":[{"message":{"content":"hi","reasoning_details":' + detail + b"}}]}"
    server.script = in_order(raw(wanted), say("so"))
    reply = await complete(server)
    await complete(server, [*HELLO, reply.message, Message("user", "and?")])
    assert server.bodies[1]["messages"][2] == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_broken_reply_that_is_nested_deeply_is_tried_again(server, stream):
    broken = b'{"choices":[{"message":{"content":"\\ud800","x":' + b"[" * 800 + b"]" * 800 + b"}}]}"
    server.script = in_order(events(b"data: " + broken + b"\n\n") if stream else raw(broken), say("hi"))
    assert (await complete(server, stream=stream)).message.content == "hi"


# ── what the model wrote all the same ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        (say("half an answ", reasoning="why", finish_reason="content_filter"), "<think>\nwhy\n</think>\nhalf an answ"),
        (say(None, reasoning="why", refusal="no " * 200), "<think>\nwhy\n</think>\n" + ("no " * 200).strip()),
        (say("", reasoning="why"), "<think>\nwhy\n</think>"),
        (call("terminal", '{"a": 1}', finish_reason="content_filter"), 'terminal({"a": 1})'),
        (say("x" * 30_000, finish_reason="content_filter"), "x" * 20_000 + "…"),
        (say(""), ""),
    ],
    ids=["filter", "refusal", "only reasoning", "call", "long", "nothing"],
)
async def test_what_a_model_wrote_in_a_reply_that_is_none_comes_with_the_error(server, answer, written):
    server.script = lambda request: answer
    with pytest.raises(RefusedError) as caught:
        await complete(server)
    assert caught.value.written == written


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
