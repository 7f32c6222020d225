"""`--retry`: which of the samples that have ended are run again."""

import re
from dataclasses import dataclass

from promptmill.errors import ConfigError

RETRY_WORDS = ("failed", "partial", "discarded", "filtered")
MAX_IDS = 100_000
_ID = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Retry:
    """A choice of ended samples."""

    typed: str = "failed"
    kinds: frozenset[str] = frozenset({"failed"})
    """Ways to end, of RETRY_WORDS."""
    indices: frozenset[int] = frozenset()
    hashes: frozenset[bytes] = frozenset()

    def names(self, index: int, content_hash: bytes) -> bool:
        """Whether a sample is chosen by itself, however it ended."""
        return index in self.indices or content_hash in self.hashes


def parse_retry(name: str, value: object) -> str:
    """A choice as it was typed, once it is seen to be one. Raises ConfigError."""
    typed = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return read_retry(typed, name).typed


def read_retry(typed: str, name: str = "retry") -> Retry:
    """A choice as typed: `failed,partial,ids:3,10-19`, or `none`.

    Raises:
        ConfigError: a word is unknown, or an id is no index, range or content hash.
    """
    kinds: set[str] = set()
    indices: set[int] = set()
    hashes: set[bytes] = set()
    typed = typed.strip()
    words = [word.strip().lower() for word in typed.split(",") if word.strip()]
    in_ids = False
    for written in words:
        word = written.removeprefix("ids:").strip()
        in_ids = in_ids or written.startswith("ids:")
        if word in RETRY_WORDS:
            kinds.add(word)
        elif in_ids and _HASH.fullmatch(word):
            hashes.add(bytes.fromhex(word))
        elif in_ids and (span := _ID.fullmatch(word)):
            indices.update(_span(name, int(span[1]), int(span[2] or span[1])))
        elif word == "none" and len(words) > 1:
            raise ConfigError(f"--{name}: 'none' stands alone")
        elif words != ["none"]:
            raise ConfigError(
                f"--{name}: {written!r} is none of {', '.join(RETRY_WORDS)}, none, or ids:… with prompt indices, "
                "ranges or content hashes, e.g. ids:3,10-19"
            )
    return Retry(typed, frozenset(kinds), frozenset(indices), frozenset(hashes))


def _span(name: str, first: int, last: int) -> range:
    if first > last or last - first >= MAX_IDS:
        raise ConfigError(f"--{name}: {first}-{last} is no range of at most {MAX_IDS:,} prompt indices")
    return range(first, last + 1)
