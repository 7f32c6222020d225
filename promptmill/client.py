"""ModelClient: one chat-completions call with its retries. The only importer of openai and its transport.

The openai package does authentication, base URL, transport and error classes. Its typed request transform and
response models are left out: they cost several times what the call itself does. Retries are ours alone (the package's
are set to 0), so that each attempt is seen; what a failure means is the table in `failures`.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import aiohttp
import httpx2
import openai
import orjson

from promptmill.bodies import decode_body
from promptmill.config import ModelSettings
from promptmill.deadlines import PromptClock
from promptmill.endpoints import is_private
from promptmill.errors import EndpointError, RefusedError, TransientModelError
from promptmill.failures import AttemptError, HttpFailure, Patience, RetryPolicy, http_error
from promptmill.limiter import Gate
from promptmill.quirks import quirks_for
from promptmill.quirks.base import ModelRequest
from promptmill.records import Message, ModelReply
from promptmill.replies import error_in, is_empty, read_reply, read_usage, refusal_reason
from promptmill.streaming import StreamCutError, read_stream, stream_fields

CONNECT_TIMEOUT_S = 30.0


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
        self._retries = retries or RetryPolicy()
        self._rng = random.Random()
        self._has_succeeded = False
        limits = httpx2.Limits(max_connections=max_connections + 10, max_keepalive_connections=max_connections + 10)
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the whole answer's deadline is our own
        # A proxy from the environment is for the world outside: a server on this machine is reached directly.
        http_client = openai.DefaultAioHttpClient(
            limits=limits, trust_env=not is_private(settings.endpoint.host), timeout=timeout
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
        """Attempt after attempt; `request_timeout_s` is for all of them together, waits apart."""
        body = encode_request(request)
        patience = Patience(self._retries, self._rng)
        left_s = self.settings.request_timeout_s
        loop = asyncio.get_running_loop()
        while True:
            with clock.paused():
                generation = await self._gate.enter()
            started_s = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    return await self._attempt(request, body, clock)
            except TimeoutError as exc:
                url, limit_s = self.settings.endpoint.base_url, self.settings.request_timeout_s
                raise TransientModelError(f"no whole answer from {url} within {limit_s:g} s") from exc
            except AttemptError as exc:
                left_s -= loop.time() - started_s
                if exc.was_refused:
                    self._gate.refused(generation)
                failed = exc
            finally:
                self._gate.leave()
            if failed.is_unreachable and not self._has_succeeded and patience.is_last(failed):
                raise EndpointError(f"{failed}; start the server or mend --base_url, then --resume") from failed
            wait_s = patience.wait_s(failed)
            with clock.paused() if failed.was_refused else nullcontext():
                await asyncio.sleep(wait_s)

    async def _exchange(self, body: bytes) -> object:
        """Send once; gives the body of an answer that has no error status, decoded, streamed or not."""
        response = await self._client.post(
            "/chat/completions",
            cast_to=httpx2.Response,
            content=body,
            options={"headers": {"Content-Type": "application/json"}},
            stream=self.settings.stream,
            stream_cls=openai.AsyncStream[Any],
        )
        assert isinstance(response, httpx2.Response)
        if not self.settings.stream:
            return decode_body(response.content)
        try:
            return await read_stream(response.aiter_bytes())
        finally:
            await response.aclose()

    async def _attempt(self, request: ModelRequest, body: bytes, clock: PromptClock) -> ModelReply:
        """Send once, and read what comes back."""
        base_url = self.settings.endpoint.base_url
        try:
            data = await self._exchange(body)
        except openai.APIStatusError as exc:
            failure = HttpFailure(exc.status_code, exc.body, exc.response.text or exc.message, exc.response.headers)
            if failure.status == 403 and self._has_succeeded:
                # The key is good: it is this prompt that a filter or a firewall on the way does not let through.
                raise RefusedError(f"{base_url} answered 403: {failure.said}") from exc
            raise http_error(failure, base_url, self.settings.model) from exc
        except (openai.APIConnectionError, aiohttp.ClientError, httpx2.HTTPError) as exc:
            # The package lets some of its transports' own errors through.
            raise _no_answer(base_url, exc.__cause__ or exc) from exc
        except StreamCutError as exc:
            clock.unanswered += read_usage(exc.body.get("usage"))
            raise AttemptError(f"{base_url}: {exc}") from exc
        except ValueError as exc:
            raise AttemptError(f"{base_url}: {exc}") from exc
        if (error := error_in(data)) is not None:
            raise http_error(_reported(error), base_url, self.settings.model)
        try:
            reply = read_reply(data, request)
        except ValueError as exc:
            raise AttemptError(str(exc)) from exc
        self._has_succeeded = True
        self._gate.succeeded()
        if reason := refusal_reason(reply):
            clock.unanswered += reply.usage
            raise RefusedError(reason)
        if is_empty(reply):
            clock.unanswered += reply.usage
            raise AttemptError("the model answered with neither text nor a tool call", final=RefusedError)
        return reply


def _reported(error: object) -> HttpFailure:
    """An error that came with status 200, as one that came with its own; a provider that failed where it names none."""
    body = error if isinstance(error, dict) else {"message": str(error)}
    code = body.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return HttpFailure(status, {"error": body}, str(error))


def _no_answer(base_url: str, cause: BaseException) -> AttemptError:
    """The endpoint was not reached, or broke off."""
    # aiohttp writes `ssl:default` for addresses without TLS too.
    detail = str(cause).replace(" ssl:default", "") or type(cause).__name__
    error = AttemptError(f"no answer from {base_url}: {detail}")
    link: BaseException | None = cause
    while link is not None:
        error.is_unreachable |= isinstance(link, aiohttp.ClientConnectorError | ConnectionRefusedError)
        link = link.__cause__
    return error


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
        message.encoded = orjson.dumps(wire_message(message))
    return message.encoded


def wire_message(message: Message) -> dict[str, Any]:
    """A message as the chat-completions API wants it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [call.as_openai() for call in message.tool_calls]
    if message.role == "tool":
        wire |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return wire | dict(message.echo)
