"""A response's bytes -> JSON. Everything in them is untrusted.

orjson refuses what no UTF-8 text can hold, such as half of a surrogate pair written as an escape. A model that splits
an emoji writes exactly that, and a reply is not asked for (and paid) twice because of it: it is mended instead.

No body is read without a bound: one that never ends, or unpacks to gigabytes, costs its reply and not the run.
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import orjson

from toolsets.text import clean_surrogates, shortened

_TAGS = re.compile(r"<(script|style)\b.*?(?:</\1>|\Z)|<[^<>]*>", re.DOTALL | re.IGNORECASE)
MAX_LOOKED_AT_CHARS = 20_000
MAX_QUOTED_CHARS = 200
CHARSETS = frozenset(
    {"iso-8859-1", "latin-1", "windows-1252", "gbk", "gb2312", "gb18030", "big5", "shift_jis", "euc-jp", "euc-kr",
     "utf-16"}
)  # fmt: skip
"""Python knows others that are no charsets (`hex`), or take minutes for a megabyte (`punycode`)."""
MAX_BODY_BYTES = 64 << 20
"""Of one reply, unpacked. The longest that models write are a hundredth of it, images in base64 some tenths."""
MAX_ERROR_BYTES = 1 << 20
"""Of an answer with an error status: what comes after is left unread, since the status alone decides most."""
MAX_LEVELS = 350
TOO_DEEP = f"the endpoint answered with JSON that is nested more than {MAX_LEVELS} levels deep, which no reply is"
_CONTAINERS = (dict, list)


async def read_body(chunks: AsyncIterator[bytes]) -> bytes:
    """A response's unpacked bytes, together. What `chunks` raises passes.

    Raises:
        ValueError: they are more than a reply can be; the rest of them is left unread.
    """
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ValueError(too_large(MAX_BODY_BYTES))
        parts.append(chunk)
    return b"".join(parts)


async def read_error_body(chunks: AsyncIterator[bytes], body: bytearray) -> None:
    """Read the beginning of an error's unpacked bytes into `body`. What `chunks` raises passes."""
    async for chunk in chunks:
        body += chunk[: MAX_ERROR_BYTES - len(body)]
        if len(body) >= MAX_ERROR_BYTES:
            return


def too_large(max_bytes: int) -> str:
    """What to say of a body that goes on beyond its bound."""
    return f"the endpoint answered with more than {max_bytes >> 20} MiB, which no reply has; the rest was not read"


def decode_body(body: bytes) -> object:
    """The JSON value of a response's body, fit to be encoded again.

    Raises:
        ValueError: it is no JSON, or nested too deeply; the message says in one sentence what it is instead.
    """
    value, is_clean = decode_json(body)
    return value if is_clean else clean_surrogates(value)


def decode_json(data: bytes) -> tuple[Any, bool]:
    """A JSON value, and whether it is free of lone surrogates; half a pair may find its other half in the next piece.

    Raises:
        ValueError: it is no JSON, or nested too deeply; the message says in one sentence what it is instead.
    """
    is_clean = True
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        is_clean = False
        try:
            value = json.loads(data.decode("utf-8-sig", errors="replace"), parse_constant=lambda _name: None)
        except (ValueError, RecursionError) as exc:
            raise ValueError(no_json(data)) from exc
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value, is_clean


def is_too_deep(value: object) -> bool:
    """Whether JSON is nested so deeply that to read it, or to send it back, could take more stack than there is."""
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_LEVELS):
        insides = [outer.values() if isinstance(outer, dict) else outer for outer in level]
        level = [inner for inside in insides for inner in inside if isinstance(inner, _CONTAINERS)]
        if not level:
            return False
    return True


def no_json(data: bytes) -> str:
    """What bytes are that are no JSON, in a sentence for a person."""
    text = data.decode(errors="replace").strip()
    if not text:
        return "the endpoint answered with an empty body instead of JSON"
    shown = shortened(" ".join(readable(text).split()), MAX_QUOTED_CHARS)
    kind = "an HTML page" if text.startswith("<") else "something that is no JSON"
    return f"the endpoint answered with {kind}: {shown}"


def readable(text: str) -> str:
    """The beginning of a text, for a person: of a page, what is between its tags."""
    start = shortened(text.strip(), MAX_LOOKED_AT_CHARS)
    return _TAGS.sub(" ", start) if start.startswith("<") else start


def decode_text(data: bytes, charset: str | None) -> str:
    """Text of an error, whatever its header says of it: what is no UTF-8 is what it says where that is usual."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        name = (charset or "").lower()
        return data.decode(name if name in CHARSETS else "utf-8", errors="replace")
