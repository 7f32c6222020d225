"""Deadlines and the limit on requests at once, over real HTTP and in a run."""

import asyncio

import pytest

from promptmill.client import ModelClient
from promptmill.deadlines import PromptClock
from promptmill.errors import TransientModelError
from promptmill.failures import RetryPolicy
from promptmill.records import Message
from tests.fakes.model_server import fail, in_order, say
from tests.rows import make_settings
from tests.test_command import run_inline

HELLO = [Message("user", "hello")]


@pytest.fixture
async def server(start_server):
    return await start_server(lambda request: say("hi", reasoning="so"))


async def drip(reader, writer, left):
    """A server that answers a byte now and then, and never ends."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
    try:
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)  # dripping is the subject
    except ConnectionError:
        left.set()
    finally:
        writer.close()


async def test_a_server_that_drips_is_ended_by_the_request_s_deadline():
    left = asyncio.Event()
    async with await asyncio.start_server(lambda *ends: drip(*ends, left), "127.0.0.1", 0) as dripping:
        port = dripping.sockets[0].getsockname()[1]
        client = ModelClient(make_settings(f"http://127.0.0.1:{port}/v1", request_timeout_s=0.2))
        try:
            with pytest.raises(TransientModelError, match=r"no whole answer from http://.* within 0.2 s"):
                await client.complete(HELLO, ())
        finally:
            await client.close()
            async with asyncio.timeout(10):
                await left.wait()


async def test_waiting_for_room_counts_against_neither_deadline(server):
    server.script = in_order(fail(429, "slow down", headers={"retry-after": "0.4"}), say("hi"))
    client = ModelClient(make_settings(server.base_url, request_timeout_s=0.3))
    try:
        async with PromptClock(0.3) as clock:
            reply = await client.complete(HELLO, (), clock)
    finally:
        await client.close()
    assert reply.message.content == "hi"


async def test_waiting_after_a_fault_counts_against_the_prompt(server):
    server.script = lambda request: fail(500, "oops")
    client = ModelClient(make_settings(server.base_url), retries=RetryPolicy(first_backoff_s=60))
    clock = PromptClock(0.2)
    try:
        with pytest.raises(TimeoutError):
            async with clock:
                await client.complete(HELLO, (), clock)
    finally:
        await client.close()
    assert clock.is_spent


async def test_an_endpoint_that_refuses_for_long_is_waited_for_beyond_the_attempts_of_a_fault(server):
    server.script = in_order(*[fail(429, "busy")] * 8, say("at last"))
    client = ModelClient(
        make_settings(server.base_url), retries=RetryPolicy(first_backoff_s=0.001, max_backoff_s=0.002)
    )
    try:
        reply = await client.complete(HELLO, ())
    finally:
        await client.close()
    assert (reply.message.content, len(server.requests)) == ("at last", 9)


async def test_refusals_slow_the_workers_down_and_lose_nothing(server, capsys):
    in_service = 0

    async def at_most_three(request):
        nonlocal in_service
        if in_service >= 3:
            return fail(429, "too many at once")
        in_service += 1
        await asyncio.sleep(0.05)
        in_service -= 1
        return say("hi", reasoning="so")

    server.script = at_most_three
    run = await run_inline(server.base_url, [f"prompt {n}" for n in range(40)], batch_size=1, num_workers=10)
    assert len(run.rows) == 40
    told = capsys.readouterr().err
    assert "refused)" in told
    assert told.count("answered 429: too many at once (waiting until it takes requests again") == 1
    refused = sum(1 for request in server.requests) - 40
    assert 0 < refused < 40
