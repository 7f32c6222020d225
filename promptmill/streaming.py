"""A streamed chat completion, joined to the body that the endpoint would have answered without streaming.

Invariants
    What is joined is read by the same `read_reply` as any other body: a reply does not depend on its transport.
    A stream that ends before its reply does is never taken for a reply.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (the framing). Servers do not all keep to it: an
event without the blank line after it and a last one without any line break are read too.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import orjson

from promptmill.bodies import MAX_BODY_BYTES, decode_body, decode_json, too_large
from promptmill.config import ModelSettings
from promptmill.joining import JoinedCompletion
from toolsets.text import clean_surrogates

MAX_STREAM_BYTES = 4 * MAX_BODY_BYTES
"""Of one streamed reply, unpacked: around each word of it, some hundreds of bytes go over the wire."""
MAX_EVENT_LINES = 1000
"""Of one event, which has one as a rule: with each further line the event is read anew, to see whether it is whole."""
MAX_READ_ANEW_BYTES = MAX_BODY_BYTES
"""Of one event, all its readings together."""
DRAIN_TIMEOUT_S = 1.0
"""How long the response's end is waited for after the end of its stream, so that the connection can be used again."""

_DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"


class StreamCutError(ValueError):
    """A stream ended before its reply did. What came of it is in `body`, its usage too: it may have been billed."""

    def __init__(self, message: str, body: dict[str, Any]) -> None:
        super().__init__(message)
        self.body = body


def stream_fields(settings: ModelSettings) -> dict[str, Any]:
    """The fields of a request that ask for a stream, and for the usage at its end; none where no stream is wanted.

    The client puts them among the fields of a request before the quirks see it, so that a quirk can change them for an
    endpoint that knows them otherwise.
    """
    return {"stream": True, "stream_options": {"include_usage": True}} if settings.stream else {}


async def read_stream(chunks: AsyncIterator[bytes]) -> object:
    """Join a response's bytes, cut anywhere, to the body of a chat completion.

    An endpoint that does not stream although it was asked to, or answers with an error, is read as what it sent. An
    error within the stream is the body's `error`, as in a body that was not streamed. What `chunks` raises passes.

    Raises:
        StreamCutError: the response ended before the reply did.
        ValueError: it is neither a stream nor JSON, or an event of it is broken, or it is more than a reply can be; the
            message says what it is.
    """
    reader = _EventReader()
    reply = _Reply()
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > (most_bytes := MAX_STREAM_BYTES if reader.has_events else MAX_BODY_BYTES):
            raise ValueError(too_large(most_bytes))
        for name, data in reader.feed(chunk):
            reply.add(name, data)
        if reply.has_ended:
            await _drain(chunks)
            return reply.body()
    try:
        for name, data in reader.end():
            reply.add(name, data)
    except ValueError:
        if not reply.joined.is_finished:
            raise StreamCutError("the stream ended within an event", reply.body()) from None
    if not reader.has_events:
        return _unstreamed(reader)
    if not reply.has_ended and not reply.joined.is_finished:
        raise StreamCutError("the stream ended before the reply did", reply.body())
    return reply.body()


def _unstreamed(reader: "_EventReader") -> object:
    """The body of a response without a single event."""
    lines = [line for line in bytes(reader.unread).splitlines() if line.strip()]
    if lines and all(line.startswith(b":") for line in lines):
        raise StreamCutError("the stream ended before anything of the reply came", {})
    return decode_body(bytes(reader.unread))


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read what comes after the end of a stream: the end of the response, as a rule."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for _ in chunks:
                pass


class _Reply:
    """What has come of a reply."""

    def __init__(self) -> None:
        self.joined = JoinedCompletion()
        self.has_ended = False
        """Whether the endpoint said that nothing more comes."""
        self._is_clean = True

    def add(self, name: bytes, data: bytes) -> None:
        """Take an event. Raises ValueError where it is no JSON, or nested too deeply."""
        if self.has_ended:
            return
        if data == _DONE:
            self.has_ended = True
            return
        value, is_clean = decode_json(data)
        # Half of a surrogate pair is kept as it is until the other half may have come with a later event.
        self._is_clean &= is_clean
        if name == b"error" and not (isinstance(value, dict) and value.get("error")):
            value = {"error": value}
        if isinstance(value, dict):
            self.joined.add(value)
            self.has_ended = self.joined.has_failed

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.joined.body() if self._is_clean else clean_surrogates(self.joined.body())
        return body


class _EventReader:
    """Bytes, cut anywhere -> the events that they hold, as name and data."""

    def __init__(self) -> None:
        self.has_events = False
        self.unread = bytearray()
        """Everything, as long as there was no event: it may be no stream."""
        self._pieces: list[bytes] = []
        """A line that has not ended yet."""
        self._name = b""
        self._data: list[bytes] = []
        self._read_anew_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take some bytes; gives the events that are whole now."""
        if not self.has_events:
            self.unread += chunk
        if b"\n" not in chunk:
            self._pieces.append(chunk)
            return
        *lines, rest = b"".join([*self._pieces, chunk]).split(b"\n")
        self._pieces = [rest]
        for line in lines:
            yield from self._take(line)

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        """Gives what is left when no more bytes come."""
        yield from self._take(b"".join(self._pieces))
        yield from self._dispatch()

    def _take(self, line: bytes) -> Iterator[tuple[bytes, bytes]]:
        for part in line.removesuffix(b"\r").split(b"\r"):
            if not part:
                yield from self._dispatch()
                continue
            field, _, value = part.removeprefix(_BOM).partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                if self._data and self._is_whole():
                    yield from self._dispatch()
                self._data.append(value)
                if len(self._data) > MAX_EVENT_LINES:
                    raise ValueError(f"the endpoint answered with an event of more than {MAX_EVENT_LINES} lines")
            elif field == b"event":
                self._name = value

    def _is_whole(self) -> bool:
        """Whether the event could end here, though no blank line says that it does."""
        data = b"\n".join(self._data)
        self._read_anew_bytes += len(data)
        if self._read_anew_bytes > MAX_READ_ANEW_BYTES and len(self._data) > 1:
            raise ValueError("the endpoint answered with an event of too many long lines")
        return _is_whole(data)

    def _dispatch(self) -> Iterator[tuple[bytes, bytes]]:
        name, data = self._name, b"\n".join(self._data).strip()
        self._name, self._data, self._read_anew_bytes = b"", [], 0
        if data:
            self.has_events = True
            self.unread.clear()
            yield name, data


def _is_whole(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.strip() == _DONE
    return True
