"""ModelClient: one chat-completions call with its retries. The only importer of openai and its transport.

The openai package does authentication, base URL, transport and error classes. Its typed request transform and
response models are left out: they cost several times what the call itself does. Retries are ours alone (the package's
are set to 0), so that each attempt is seen.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx2
import openai
import orjson

from promptmill.config import ModelSettings
from promptmill.endpoints import is_private
from promptmill.errors import (
    ContextFullError,
    EndpointError,
    ModelError,
    RefusedError,
    RejectedRequestError,
    TransientModelError,
)
from promptmill.quirks import quirks_for
from promptmill.quirks.base import ModelRequest
from promptmill.records import Message, ModelReply
from promptmill.replies import is_empty, read_reply, refusal_reason

REQUEST_TIMEOUT_S = 1800.0

_CONTEXT_WORDS = (
    "context length",
    "context window",
    "context size",
    "maximum context",
    "too many tokens",
    "too long",
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is tried, and how long it waits in between."""

    max_attempts: int = 4
    first_backoff_s: float = 1.0
    """Doubled for each further attempt; half of each wait is drawn at random so that workers do not retry in step."""
    max_backoff_s: float = 60.0
    max_retry_after_s: float = 600.0
    """A server's Retry-After beyond this is cut to it."""

    def backoff_s(self, attempt: int, rng: random.Random) -> float:
        """Wait after a failed attempt (from 1) for which the server named no time."""
        ceiling = min(self.first_backoff_s * 2.0 ** (attempt - 1), self.max_backoff_s)
        return ceiling / 2 + rng.uniform(0, ceiling / 2)


class ModelClient:
    """Calls to one model at one endpoint; one per process, shared by its conversations. Close it at the end."""

    def __init__(
        self, settings: ModelSettings, *, max_connections: int = 100, retries: RetryPolicy | None = None
    ) -> None:
        self.settings = settings
        self.quirks = quirks_for(settings)
        self._retries = retries or RetryPolicy()
        self._rng = random.Random()
        self._has_succeeded = False
        limits = httpx2.Limits(max_connections=max_connections + 10, max_keepalive_connections=max_connections + 10)
        # A proxy from the environment is for the world outside: a server on this machine is reached directly.
        http_client = openai.DefaultAioHttpClient(
            limits=limits, trust_env=not is_private(settings.endpoint.host), timeout=REQUEST_TIMEOUT_S
        )
        self._client = openai.AsyncOpenAI(
            api_key=settings.endpoint.api_key,
            base_url=settings.endpoint.base_url,
            max_retries=0,
            timeout=REQUEST_TIMEOUT_S,
            http_client=http_client,
        )
        if settings.endpoint.host != "api.openai.com":
            # The package would send OPENAI_ORG_ID, OPENAI_PROJECT_ID and OPENAI_CUSTOM_HEADERS to any host.
            self._client.organization = self._client.project = None
            self._client._custom_headers = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def complete(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> ModelReply:
        """One model call: send, retry what may pass, read the reply.

        Raises:
            TransientModelError: provider or network failed past all attempts.
            RefusedError: a content filter, or neither text nor call, past all attempts.
            ContextFullError: the conversation is larger than the model's context.
            RejectedRequestError: the endpoint says that the request is wrong.
            EndpointError: every further call would be refused too; the run must stop.
        """
        request = ModelRequest(messages, tools, self._base_fields())
        for quirk in self.quirks:
            quirk.change_request(request)
        body = encode_request(request)
        reply = await self._send_with_retries(body)
        for quirk in reversed(self.quirks):
            reply = quirk.change_reply(reply, request)
        return reply

    def _base_fields(self) -> dict[str, Any]:
        optional = {name: getattr(self.settings, name) for name in ("max_tokens", "temperature", "top_p")}
        return {"model": self.settings.model} | {name: value for name, value in optional.items() if value is not None}

    async def _send_with_retries(self, body: bytes) -> ModelReply:
        attempt = 1
        while True:
            try:
                return await self._send_once(body)
            except _AttemptError as exc:
                if attempt >= self._retries.max_attempts and exc.is_unreachable and not self._has_succeeded:
                    raise EndpointError(f"{exc}; start the server or mend --base_url, then --resume") from exc
                if attempt >= self._retries.max_attempts:
                    raise exc.final(f"{exc} (after {attempt} attempts)") from exc
                wait_s = exc.retry_after_s
                if wait_s is None:
                    wait_s = self._retries.backoff_s(attempt, self._rng)
                await asyncio.sleep(min(wait_s, self._retries.max_retry_after_s))
                attempt += 1

    async def _send_once(self, body: bytes) -> ModelReply:
        try:
            response = await self._client.post(
                "/chat/completions",
                cast_to=httpx2.Response,
                content=body,
                options={"headers": {"Content-Type": "application/json"}},
            )
        except openai.APIStatusError as exc:
            if exc.status_code == 403 and self._has_succeeded:
                # The key is good: it is this prompt that a filter or a firewall on the way does not let through.
                raise RefusedError(f"{self.settings.endpoint.base_url} answered 403: {_error_text(exc)}") from exc
            raise _status_error(exc, self.settings) from exc
        except (openai.APIConnectionError, aiohttp.ClientError) as exc:  # the package lets some of aiohttp's through
            raise _no_answer(self.settings.endpoint.base_url, exc.__cause__ or exc) from exc
        try:
            data = orjson.loads(response.content)
        except orjson.JSONDecodeError as exc:
            raise _AttemptError(f"{self.settings.endpoint.base_url} answered with something that is no JSON") from exc
        try:
            reply = read_reply(data)
        except ValueError as exc:
            raise _AttemptError(str(exc)) from exc
        self._has_succeeded = True
        if reason := refusal_reason(reply):
            raise RefusedError(reason)
        if is_empty(reply):
            raise _AttemptError("the model answered with neither text nor a tool call", final=RefusedError)
        return reply


class _AttemptError(Exception):
    """This attempt failed in a way that may pass."""

    def __init__(
        self, message: str, retry_after_s: float | None = None, final: type[ModelError] = TransientModelError
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the server asked for; None when it named no time."""
        self.is_unreachable = False
        """Whether nothing took the connection: no such host, or nobody listens there."""
        self.final = final
        """What is raised when no attempt is left."""


def _no_answer(base_url: str, cause: BaseException) -> _AttemptError:
    """The endpoint was not reached, or broke off."""
    # aiohttp writes `ssl:default` for addresses without TLS too.
    detail = str(cause).replace(" ssl:default", "") or type(cause).__name__
    error = _AttemptError(f"no answer from {base_url}: {detail}")
    while cause is not None:
        error.is_unreachable |= isinstance(cause, aiohttp.ClientConnectorError | ConnectionRefusedError)
        cause = cause.__cause__  # type: ignore[assignment]
    return error


def _status_error(exc: openai.APIStatusError, settings: ModelSettings) -> Exception:
    """What an HTTP status means for the call."""
    status, text = exc.status_code, _error_text(exc)
    where = f"{settings.endpoint.base_url} answered {status}: {text}"
    if status == 403 and _was_flagged(exc):
        return RefusedError(where)
    if status in (401, 402, 403) or exc.code == "insufficient_quota":
        return EndpointError(f"{where}; check the key and the account, then --resume")
    if status == 404:
        return EndpointError(f"{where}; check --model={settings.model} and --base_url, then --resume")
    if status == 413 or (status == 400 and any(word in text.lower() for word in _CONTEXT_WORDS)):
        return ContextFullError(where)
    if status in (408, 409, 425, 429) or status >= 500:
        return _AttemptError(where, _retry_after_s(exc.response.headers))
    return RejectedRequestError(where)


def _was_flagged(exc: openai.APIStatusError) -> bool:
    """Whether a 403 is about this prompt alone. Source: https://openrouter.ai/docs/api-reference/errors"""
    metadata = exc.body.get("metadata") if isinstance(exc.body, dict) else None
    return isinstance(metadata, dict) and not metadata.keys().isdisjoint({"reasons", "flagged_input"})


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        wait_s = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(wait_s, 0.0) if math.isfinite(wait_s) else None


def _error_text(exc: openai.APIStatusError, max_chars: int = 500) -> str:
    body = exc.body if isinstance(exc.body, dict) else {}
    text = body.get("message") or exc.response.text or exc.message
    return " ".join(str(text).split())[:max_chars]


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
