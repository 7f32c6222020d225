"""ModelClient: one chat-completions call with its retries. The only importer of openai and its transport.

The openai package does authentication, base URL, transport and error classes. Its typed request transform and
response models are left out: they cost several times what the call itself does. Retries are ours alone (the package's
are set to 0), so that each attempt is seen; what a failure means is the table in `verdicts`; what it ends in
is in `failures`.

Invariants
    Nothing is sent to a server that the user has not named: a redirect to another one stops the run.
    No body is read without a bound, whatever its status (see `bodies`).
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import httpx2
import openai
import orjson

from promptmill.bodies import decode_body, decode_text, read_body, read_error_body
from promptmill.config import ModelSettings
from promptmill.deadlines import PromptClock
from promptmill.endpoints import is_private
from promptmill.errors import THEN_AGAIN, EndpointError, RefusedError, TransientModelError
from promptmill.failures import AttemptError, Patience, RetryPolicy, http_error
from promptmill.limiter import Gate
from promptmill.quirks import quirks_for
from promptmill.quirks.base import ModelRequest
from promptmill.records import Message, ModelReply
from promptmill.replies import error_in, is_empty, read_reply, read_usage, refusal_reason
from promptmill.secrets import remember
from promptmill.streaming import StreamCutError, read_stream, stream_fields
from promptmill.verdicts import HttpFailure, reported_failure
from promptmill.wording import duration
from toolsets.text import shortened

CONNECT_TIMEOUT_S = 30.0
ERROR_BODY_TIMEOUT_S = 10.0
MAX_WRITTEN_CHARS = 20_000
"""How much of what a model wrote is kept where it became no turn."""
RETRIES = RetryPolicy()
"""What a run has the patience for."""
UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ConnectionRefusedError)
"""Nothing took the connection, so nothing was asked and nothing is paid."""

logger = logging.getLogger(__name__)


class ModelClient:
    """Calls to one model at one endpoint; one per process, shared by its conversations. Close it at the end.

    Args:
        max_connections: Conversations that may call at once.
        gate: Where calls wait for their turn; None for no limit.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        max_connections: int = 100,
        gate: Gate | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.quirks = quirks_for(settings)
        self._gate = gate or Gate(max_connections)
        self._retries = retries or RETRIES
        self._rng = random.Random()
        self._has_succeeded = False
        """Whether a model has replied: key, address and model are good."""
        self._has_answered = False
        """Whether the endpoint has sent anything at all."""
        self._gone_since_s: float | None = None
        """Since when it cannot be reached, though it had answered before; None while it can."""
        remember([settings.endpoint.api_key])
        limits = httpx2.Limits(max_connections=max_connections + 10, max_keepalive_connections=max_connections + 10)
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the whole answer's deadline is our own
        # A proxy from the environment is for the world outside: a server on this machine is reached directly.
        http_client = openai.DefaultAioHttpClient(
            limits=limits,
            trust_env=not is_private(settings.endpoint.host),
            timeout=timeout,
            event_hooks={"response": [self._look_at_headers]},
        )
        self._client = openai.AsyncOpenAI(
            api_key=settings.endpoint.api_key,
            base_url=settings.endpoint.base_url,
            max_retries=0,
            timeout=timeout,
            http_client=http_client,
        )
        if settings.endpoint.host != "api.openai.com":
            # The package would send OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS to any host.
            self._client.organization = self._client.project = None
            self._client._custom_headers = {}

    async def close(self) -> None:
        """Close the connections."""
        self._gate.close()
        await self._client.close()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], clock: PromptClock | None = None
    ) -> ModelReply:
        """One model call: send, retry what may pass, read the reply.

        Args:
            messages: The conversation.
            tools: Schemas of the tools that are offered.
            clock: The prompt's own; it stands still while the call waits for the endpoint to have room.

        Raises:
            TransientModelError: provider or network failed past all attempts, or past `request_timeout_s`.
            RefusedError: a content filter, or neither text nor call, past all attempts.
            ContextFullError: the conversation is larger than the model's context.
            RejectedRequestError: the endpoint says that the request is wrong.
            EndpointError: every further call would be refused too; the run must stop.
        """
        request = ModelRequest(messages, tools, self._base_fields())
        for quirk in self.quirks:
            quirk.change_request(request)
        reply = await self._until_answered(request, clock or PromptClock())
        for quirk in reversed(self.quirks):
            reply = quirk.change_reply(reply, request)
        return reply

    def _base_fields(self) -> dict[str, Any]:
        optional = {name: getattr(self.settings, name) for name in ("max_tokens", "temperature", "top_p")}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"model": self.settings.model} | given | stream_fields(self.settings)

    async def _until_answered(self, request: ModelRequest, clock: PromptClock) -> ModelReply:
        """Attempt after attempt; `request_timeout_s` is for all of them together, their waits included.

        Its clock stands still for what nothing is paid for: a wait for room, and one for an endpoint that is gone.
        """
        body = encode_request(request)
        patience = Patience(self._retries, self._rng)
        limit_s = left_s = self.settings.request_timeout_s
        loop = asyncio.get_running_loop()
        while True:
            with clock.paused():
                generation = await self._gate.enter()
            started_s = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    return await self._attempt(request, body, clock)
            except TimeoutError as exc:
                url = self.settings.endpoint.base_url
                raise TransientModelError(f"no whole answer from {url} within {limit_s:g} s") from exc
            except AttemptError as exc:
                failed = exc
                if failed.was_refused:
                    self._gate.refused(generation, str(failed))
            finally:
                self._gate.leave()
            if failed.is_unreachable and self._has_answered:
                with clock.paused():
                    await asyncio.sleep(self._outage_wait_s(patience, failed))
                continue
            left_s -= loop.time() - started_s
            if failed.is_unreachable and patience.is_last(failed):
                raise EndpointError(f"{failed}; start the server or mend --base_url, {THEN_AGAIN}") from failed
            wait_s = patience.wait_s(failed)
            if failed.was_refused:
                with clock.paused():
                    await asyncio.sleep(wait_s)
                continue
            if wait_s >= left_s:
                raise patience.given_up(failed, f"; --request_timeout_s={limit_s:g} leaves no time for another")
            slept_s = loop.time()
            await asyncio.sleep(wait_s)
            left_s -= loop.time() - slept_s

    def _outage_wait_s(self, patience: Patience, failed: AttemptError) -> float:
        """How long to wait for an endpoint that has answered before and cannot be reached now.

        Raises:
            EndpointError: it has been so for too long.
        """
        now_s, url = asyncio.get_running_loop().time(), self.settings.endpoint.base_url
        most = duration(self._retries.max_outage_s)
        if self._gone_since_s is None:
            self._gone_since_s = now_s
            logger.warning("%s does not answer; waiting up to %s", url, most)
        left_s = self._gone_since_s + self._retries.max_outage_s - now_s
        if left_s <= 0:
            raise EndpointError(f"{url} has not answered for {most} ({failed}); mend it, {THEN_AGAIN}")
        return min(patience.outage_wait_s(), left_s)

    async def _exchange(self, body: bytes) -> object:
        """Send once; gives the body of an answer that has no error status, decoded, streamed or not.

        Raises:
            _StatusError: the answer has an error status.
            ValueError: it is nothing that can be read.
            EndpointError: it leads to another server.
        """
        response = await self._client.post(
            "/chat/completions",
            cast_to=httpx2.Response,
            content=body,
            options={"headers": {"Content-Type": "application/json"}},
            stream=True,  # to read the body is left to us, whether it is streamed or not
            stream_cls=openai.AsyncStream[Any],
        )
        assert isinstance(response, httpx2.Response)
        try:
            chunks = response.aiter_bytes()
            return await read_stream(chunks) if self.settings.stream else decode_body(await read_body(chunks))
        finally:
            await response.aclose()

    async def _look_at_headers(self, response: httpx2.Response) -> None:
        """Called for every response, those that redirect too, before its body is read or its redirect followed.

        Raises:
            _StatusError: it has an error status.
            EndpointError: it leads to another server.
        """
        self._has_answered, self._gone_since_s = True, None
        if response.has_redirect_location:
            _refuse_another_server(response, self.settings.endpoint.base_url)
            # The transport would read the body, however long, before it follows.
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            await response.stream.aclose()
            response.stream = httpx2.ByteStream(b"")
        elif not response.is_success:
            raise await _status_error(response)

    async def _attempt(self, request: ModelRequest, body: bytes, clock: PromptClock) -> ModelReply:
        """Send once, and read what comes back."""
        base_url = self.settings.endpoint.base_url
        try:
            data = await self._exchange(body)
        except _StatusError as exc:
            failure = replace(exc.failure, sent=body, has_succeeded=self._has_succeeded)
            raise http_error(failure, self.settings.endpoint, self.settings.model) from exc
        except (openai.APIConnectionError, aiohttp.ClientError, httpx2.HTTPError) as exc:
            # The package lets some of its transports' own errors through.
            raise _no_answer(base_url, exc.__cause__ or exc) from exc
        except StreamCutError as exc:
            clock.unanswered += read_usage(exc.body.get("usage"))
            raise AttemptError(f"{base_url}: {exc}") from exc
        except ValueError as exc:
            raise AttemptError(f"{base_url}: {exc}") from exc
        if (error := error_in(data)) is not None:
            failure = reported_failure(error, sent=body, has_succeeded=self._has_succeeded)
            raise http_error(failure, self.settings.endpoint, self.settings.model)
        try:
            reply = read_reply(data, request)
        except ValueError as exc:
            raise AttemptError(str(exc)) from exc
        self._has_succeeded = True
        self._gate.succeeded()
        if reason := refusal_reason(reply):
            clock.unanswered += reply.usage
            raise RefusedError(reason, written_in(reply))
        if is_empty(reply):
            clock.unanswered += reply.usage
            said = "the model answered with neither text nor a tool call"
            raise AttemptError(said, final=RefusedError, written=written_in(reply))
        return reply


class _StatusError(Exception):
    """The answer has an error status."""

    def __init__(self, failure: HttpFailure) -> None:
        super().__init__(f"status {failure.status}")
        self.failure = failure


async def _status_error(response: httpx2.Response) -> _StatusError:
    """What an answer with an error status says, as far as it is read."""
    data = bytearray()
    # The status decides, however little can be read of what comes with it.
    with suppress(TimeoutError, aiohttp.ClientError, httpx2.HTTPError):
        async with asyncio.timeout(ERROR_BODY_TIMEOUT_S):
            await read_error_body(response.aiter_bytes(), data)
    try:
        body = decode_body(bytes(data))
    except ValueError:
        body = None
    text = decode_text(bytes(data), response.charset_encoding).strip() or response.reason_phrase
    return _StatusError(HttpFailure(response.status_code, body, text, response.headers, str(response.url)))


def _refuse_another_server(response: httpx2.Response, base_url: str) -> None:
    """Let no redirect take the prompts to a server that the user has not named.

    It stops the run, as an address that does not exist does: every further request would be led away too, and only a
    person knows whether the other server is to be trusted.

    Raises:
        EndpointError: it leads to another scheme, host or port.
    """
    try:
        goal = response.url.join(response.headers["location"])
    except httpx2.InvalidURL:
        return  # the transport says what is wrong with it
    if (goal.scheme, goal.host, goal.port) != (response.url.scheme, response.url.host, response.url.port):
        raise EndpointError(
            f"{base_url} redirects ({response.status_code}) to another server, {goal.scheme}://{goal.netloc.decode()}; "
            f"nothing was sent there: if you mean that one, name it with --base_url, {THEN_AGAIN}"
        )


def _no_answer(base_url: str, cause: BaseException) -> AttemptError:
    """The endpoint was not reached, or broke off."""
    # aiohttp writes `ssl:default` for addresses without TLS too.
    detail = " ".join(str(cause).replace(" ssl:default", "").split()) or type(cause).__name__
    error = AttemptError(f"no answer from {base_url}: {detail}")
    link: BaseException | None = cause
    while link is not None:
        error.is_unreachable |= isinstance(link, UNREACHABLE)
        link = link.__cause__
    return error


def written_in(reply: ModelReply) -> str:
    """What a model wrote in a reply that becomes no turn, for a person who wants it all the same."""
    message = reply.message
    thought = f"<think>\n{message.reasoning}\n</think>" if message.reasoning else ""
    calls = (f"{call.name}({call.arguments})" for call in message.tool_calls)
    written = "\n".join(part for part in (thought, message.content, reply.refusal, *calls) if part)
    return shortened(written, MAX_WRITTEN_CHARS) + ("…" if len(written) > MAX_WRITTEN_CHARS else "")


def encode_request(request: ModelRequest) -> bytes:
    """The request's body. A message is encoded once, however often it is sent."""
    body: dict[str, Any] = {
        **request.fields,
        "messages": [orjson.Fragment(_encoded(message)) for message in request.messages],
    }
    if request.tools:
        body["tools"] = request.tools
    return orjson.dumps(body)


def _encoded(message: Message) -> bytes:
    if not message.encoded:
        try:
            message.encoded = orjson.dumps(wire_message(message))
        except TypeError:  # what the endpoint wanted back is nested too deeply, or holds a number above 64 bits
            message.encoded = orjson.dumps(wire_message(replace(message, echo={})))
    return message.encoded


def wire_message(message: Message) -> dict[str, Any]:
    """A message as the chat-completions API wants it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [call.as_openai() for call in message.tool_calls]
    if message.role == "tool":
        wire |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return wire | dict(message.echo)
