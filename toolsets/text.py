"""Text from a sandbox: hostile bytes in, bounded text out. Nothing here reads meaning into it."""

import re
from collections.abc import Callable
from typing import Any

import orjson

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor moves
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating-system commands: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # device strings
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|\x9b[0-?]*[ -/]*[@-~]"  # control sequences in their one-byte form
)


def _as_it_is(text: str) -> str:
    return text


_mask: Callable[[str], str] = _as_it_is


def mask_before_cutting(mask: Callable[[str], str]) -> None:
    """Have every text of this process go through this before a part of it is cut off.

    Who masks secrets in what is written does it at the end, and knows half a secret no more.
    """
    global _mask
    _mask = mask


def masked(text: str) -> str:
    """A text, fit to be cut anywhere: without the secrets that are known in this process."""
    return _mask(text)


def shortened(text: str, max_chars: int) -> str:
    """A text's first characters."""
    return text if len(text) <= max_chars else _mask(text)[:max_chars]


def ending(text: str, max_chars: int) -> str:
    """A text's last characters."""
    return text if len(text) <= max_chars else _mask(text)[-max_chars:]


def strip_escapes(text: str) -> str:
    """Remove terminal escape sequences."""
    return _ESCAPES.sub("", text) if "\x1b" in text or "\x9b" in text else text


def clean_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which no UTF-8 text can hold, in all strings of a JSON value."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [clean_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {clean_surrogates(key): clean_surrogates(item) for key, item in value.items()}
    return value


def cut_middle(head: str, tail: str, omitted_chars: int, max_chars: int) -> str:
    """Join what is left of a long text, keeping 40 % of `max_chars` from its start and 60 % from its end.

    Args:
        head: The text, or its start when something after it is missing already.
        tail: What came after the missing part; empty when nothing is missing.
        omitted_chars: How much is missing between the two.
        max_chars: How much of the text to keep; the notice comes on top.
    """
    if not omitted_chars:
        if len(head) + len(tail) <= max_chars:
            return head + tail
        head = tail = _mask(head + tail)
    else:
        head, tail = _mask(head), _mask(tail)
    total = len(head) + omitted_chars + (len(tail) if omitted_chars else 0)
    room_at_start = max_chars * 40 // 100
    start, end = head[:room_at_start], tail[room_at_start - max_chars :]
    omitted = total - len(start) - len(end)
    return f"{start}\n\n... [OUTPUT TRUNCATED - {omitted} chars omitted out of {total} total] ...\n\n{end}"


def cut_end(text: str, max_chars: int) -> str:
    """Shorten one line, saying so."""
    return text if len(text) <= max_chars else shortened(text, max_chars) + "... [truncated]"


def encoded_chars(text: str) -> int:
    """How many characters a text takes inside a JSON result."""
    return len(orjson.dumps(text).decode()) - 2


def is_binary(data: bytes) -> bool:
    """Whether bytes are anything but text, judged by their start as grep and git do."""
    return b"\0" in data[:8192]
