"""A response's bytes -> JSON. Everything in them is untrusted.

orjson refuses what no UTF-8 text can hold, such as half of a surrogate pair written as an escape. A model that splits
an emoji writes exactly that, and a reply is not asked for (and paid) twice because of it: it is mended instead.
"""

import json
import re
from typing import Any

import orjson

from toolsets.text import clean_surrogates

_TAGS = re.compile(rb"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
MAX_QUOTED_CHARS = 200


def decode_body(body: bytes) -> object:
    """The JSON value of a response's body, fit to be encoded again.

    Raises:
        ValueError: it is no JSON; the message says in one sentence what it is instead.
    """
    value, is_clean = decode_json(body)
    return value if is_clean else clean_surrogates(value)


def decode_json(data: bytes) -> tuple[Any, bool]:
    """A JSON value, and whether it is free of lone surrogates; half a pair may find its other half in the next piece.

    Raises:
        ValueError: it is no JSON; the message says in one sentence what it is instead.
    """
    try:
        return orjson.loads(data), True
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data.decode("utf-8-sig", errors="replace"), parse_constant=lambda _name: None), False
    except (ValueError, RecursionError) as exc:
        raise ValueError(no_json(data)) from exc


def no_json(data: bytes) -> str:
    """What bytes are that are no JSON, in a sentence for a person."""
    start = data[:20_000].strip()
    if not start:
        return "the endpoint answered with an empty body instead of JSON"
    is_page = start.startswith(b"<")
    shown = " ".join((_TAGS.sub(b" ", start) if is_page else start).decode(errors="replace").split())
    kind = "an HTML page" if is_page else "something that is no JSON"
    return f"the endpoint answered with {kind}: {shown[:MAX_QUOTED_CHARS]}"
