"""Every kind of failure over real HTTP, answered whole and streamed: the requests it costs, the wait, and its class."""

import time

import pytest

from promptmill.client import ModelClient
from promptmill.errors import (
    ContextFullError,
    EndpointError,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)
from promptmill.failures import RetryPolicy
from promptmill.records import Message
from tests.fakes.model_server import drop, fail, raw, say
from tests.rows import make_settings

QUICK = RetryPolicy(max_attempts=3, max_refusals=5, first_backoff_s=0.001, max_backoff_s=0.002)

KINDS = {
    "500": (fail(500, "oops"), TransientModelError, 3, 0.0),
    "502 with a page": (raw("<html>bad gateway</html>", status=502), TransientModelError, 3, 0.0),
    "503": (fail(503, "no capacity"), TransientModelError, 3, 0.0),
    "503 that names a time": (fail(503, "busy", headers={"retry-after": "0.05"}), TransientModelError, 5, 0.2),
    "408": (fail(408, "slow"), TransientModelError, 3, 0.0),
    "429": (fail(429, "slow down"), TransientModelError, 5, 0.0),
    "429 in milliseconds": (fail(429, "slow", headers={"retry-after-ms": "40"}), TransientModelError, 5, 0.16),
    "429 per minute": (fail(429, "quota exceeded: requests per minute"), TransientModelError, 5, 0.0),
    "429 exhausted": (fail(429, "You exceeded your current quota"), EndpointError, 1, 0.0),
    "529": (fail(529, "overloaded"), TransientModelError, 5, 0.0),
    "dropped": (drop(), TransientModelError, 3, 0.0),
    "page instead of JSON": (raw("<html>hello</html>"), TransientModelError, 3, 0.0),
    "error inside a 200": (raw('{"error": {"code": 502, "message": "provider down"}}'), TransientModelError, 3, 0.0),
    "no choices": (raw('{"choices": []}'), TransientModelError, 3, 0.0),
    "nothing said": (say(""), RefusedError, 3, 0.0),
    "content filter": (say("", finish_reason="content_filter"), RefusedError, 1, 0.0),
    "400": (fail(400, "messages: bad"), RejectedRequestError, 1, 0.0),
    "400 too long": (fail(400, "maximum context length is 10"), ContextFullError, 1, 0.0),
    "400 no such model": (fail(400, "x is not a valid model ID"), EndpointError, 1, 0.0),
    "413": (fail(413, "too large"), ContextFullError, 1, 0.0),
    "401": (fail(401, "bad key"), EndpointError, 1, 0.0),
    "402": (fail(402, "no credit"), EndpointError, 1, 0.0),
    "403": (fail(403, "forbidden"), EndpointError, 1, 0.0),
    "403 flagged": (fail(403, "flagged by moderation"), RefusedError, 1, 0.0),
    "404": (fail(404, "no such route"), EndpointError, 1, 0.0),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_failure_costs_what_its_kind_costs(start_server, kind, stream):
    answer, error, requests, least_wait_s = KINDS[kind]
    server = await start_server(lambda request: answer)
    client = ModelClient(make_settings(server.base_url, stream=stream), retries=QUICK)
    started_s = time.monotonic()
    try:
        with pytest.raises(error):
            await client.complete([Message("user", "hello")], ())
    finally:
        await client.close()
    assert len(server.requests) == requests
    assert time.monotonic() - started_s >= least_wait_s
    assert all(request.body.get("stream", False) is stream for request in server.requests)
