"""Secrets that the runner holds, masked by value in all that is written or shown.

What is held
    The endpoint's key, the values of environment variables whose names end as those of secrets do (`…_API_KEY`,
    `…_TOKEN`, `…_SECRET`, `…_PASSWORD`, …; of a list, each part), and the password within an address (`HTTP_PROXY`).

What is no ordinary word
    Only a value is masked that could not stand in a text by chance: at least 8 characters with a letter and a digit
    among them, or at least 8 that begin as keys do (`sk-`, `hf_`, `ghp_`, …), or at least 16 of any kind. So
    `--api_key=EMPTY` or `APP_TOKEN=disabled` changes no row. The name of an existing file is not masked either.

Forms
    As it is; escaped for JSON, once or twice; URL-encoded; in hexadecimal; in base64 in all three alignments and both
    alphabets. A form of at least 32 characters is also found broken into lines, or cut off where its first 20 or its
    last 12 are left. What we cut ourselves is masked before (`remember`), so there a secret of any length is.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

import orjson

from toolsets.text import mask_before_cutting

MASKED = "***"
HEAD_CHARS, PIECE_CHARS = 20, 12
"""How much of a form is known again when the rest is cut off; the keys of a vendor may share their first 13."""
LONG_FORM_CHARS = HEAD_CHARS + PIECE_CHARS
BREAKABLE_CHARS = 48
"""From here on two lines may end within a form: base64 is written in lines of 64 or 76."""

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PAT|CREDENTIAL)S?$|SECRET", re.IGNORECASE
)
_KEY_BEGINNING = re.compile(r"(?:sk|pk|rk|hf|gsk|xai|nvapi|gh[opsu]|github_pat|glpat|xox[a-z]|AKIA|AIza)[-_]?")
_PASSWORD_OF_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@:\s]*:([^/@\s]+)@", re.IGNORECASE)
_BREAK = re.compile(r"(?:\\+r)?\\+n|\r?\n")
_BREAK_REVERSED = re.compile(r"n\\+(?:r\\+)?|\n\r?")
_PERCENT = re.compile(r"%[0-9A-F]{2}")


def secrets_in(environ: Mapping[str, str], *given: str) -> tuple[str, ...]:
    """The values to mask: those given and those of the environment, ordinary words left out."""
    values = set(given)
    for name, value in environ.items():
        if _SECRET_NAME.search(name):
            values.add(value)
            if not value.lstrip().startswith(("{", "[")):
                values.update(re.split(r"[,;\s]+", value))
        if match := _PASSWORD_OF_ADDRESS.match(value):
            values.update((match[1], unquote(match[1])))
    return tuple(sorted(value for value in map(str.strip, values) if is_secret(value) and not _is_file(value)))


def secrets_typed(words: Iterable[str]) -> Iterator[str]:
    """The keys among the words of a command line: values of flags that are named so, and what begins as keys do."""
    is_named = False
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        says_so = bool(name) and _SECRET_NAME.search(name.replace("-", "_")) is not None
        begins = _KEY_BEGINNING.match(value)
        looks_so = begins is not None and len(begins[0]) > 2 and any(map(str.isdigit, value))
        if value and (is_named or says_so or looks_so):
            yield value
        is_named = says_so and not equals


def is_secret(value: str) -> bool:
    """Whether a value is long and odd enough to be no ordinary word; see the top of this file."""
    is_mixed = any(map(str.isalpha, value)) and any(map(str.isdigit, value))
    return len(value) >= 16 or (len(value) >= 8 and (is_mixed or _KEY_BEGINNING.match(value) is not None))


def _is_file(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False


class Mask:
    """Replaces secrets by `***`. Cheap where there is none: a few substring searches."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._forms = sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True)
        encoded = {*self._forms, *(escaped for form in self._forms for escaped in _escaped(form))}
        self._signs = tuple(_signs(self._forms))
        self._encoded_signs = tuple(sign.encode("utf-8", "surrogatepass") for sign in _signs(encoded))

    def suspects(self, encoded: bytes) -> bool:
        """Whether there may be a secret in encoded JSON."""
        return any(sign in encoded for sign in self._encoded_signs)

    def text(self, text: str) -> str:
        """The text without secrets."""
        if not any(sign in text for sign in self._signs):
            return text
        parts: list[str] = []
        end = 0
        for start, stop in sorted(span for form in self._forms for span in _spans(text, form)):
            if stop <= end:
                continue
            if start > end or not parts:
                parts += [text[end:start], MASKED]
            end = stop
        return "".join([*parts, text[end:]])

    def value(self, value: Any) -> Any:
        """A JSON value without secrets. A string in it that is JSON itself stays JSON."""
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, Mapping):
            return {self.text(name): self.value(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(entry) for entry in value]
        return value

    def json_bytes(self, encoded: bytes) -> bytes:
        """Encoded JSON without secrets."""
        return orjson.dumps(self.value(orjson.loads(encoded))) if self.suspects(encoded) else encoded

    def _string(self, text: str) -> str:
        masked = self.text(text)
        if masked == text or text[:1] not in ("{", "["):
            return masked
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError:
            return masked
        try:
            orjson.loads(masked)
        except orjson.JSONDecodeError:  # a form began within an escape, or was a number
            try:
                return orjson.dumps(self._nested(content)).decode()
            except (RecursionError, orjson.JSONEncodeError):  # nested too deeply to be written again
                return masked
        return masked

    def _nested(self, value: Any) -> Any:
        """`value`, in which numbers may be secrets too."""
        if isinstance(value, dict):
            return {self.text(name): self._nested(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._nested(entry) for entry in value]
        if isinstance(value, int | float) and self.text(str(value)) != str(value):
            return MASKED
        return self.value(value)


def _forms(secret: str) -> Iterator[str]:
    """Every way a secret may be written down."""
    raw = secret.encode("utf-8", "surrogateescape")
    yield secret
    for once in _escaped(secret):
        yield once
        yield from _escaped(once)
    for safe in ("", "/", "!*'()", "!*'();,/?:@&=+$#"):
        yield from _both_cases(quote(raw, safe=safe))
    yield from _both_cases(quote_plus(raw))
    yield from (raw.hex(), raw.hex().upper())
    for offset in range(3):
        # Only characters that no neighbour has a part in: 8 bits a byte, 6 a character.
        first, last = -(-offset * 8 // 6), (offset + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(offset) + raw).decode()[first:last]


def _escaped(text: str) -> Iterator[str]:
    """A text as it stands within a JSON string, as various programs write it."""
    for ascii_only in (False, True):
        inner = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield from (inner, inner.replace("/", "\\/"))


def _both_cases(text: str) -> Iterator[str]:
    yield text
    yield _PERCENT.sub(lambda match: match[0].lower(), text)


def _pieces(form: str) -> Iterator[tuple[int, str]]:
    """Parts of a form, with their places in it, one of which is in every text that holds the form, whole or not."""
    if len(form) < LONG_FORM_CHARS:
        yield 0, form
        return
    yield 0, form[:HEAD_CHARS]
    yield len(form) - PIECE_CHARS, form[-PIECE_CHARS:]
    if len(form) >= BREAKABLE_CHARS:  # a line may end within both of these
        yield len(form) // 2, form[len(form) // 2 :][:PIECE_CHARS]


def _signs(forms: Iterable[str]) -> set[str]:
    return {piece for form in forms for _, piece in _pieces(form)}


def _spans(text: str, form: str) -> Iterator[tuple[int, int]]:
    """Where a form is in a text, or what is left of it: start and end of each place."""
    reversed_text = text[::-1]
    for offset, piece in _pieces(form):
        for start in _places(text, piece):
            end = start + len(piece)
            rest = form[offset - 1 :: -1] if offset else ""
            begin = len(text) - _reach(reversed_text, len(text) - start, rest, _BREAK_REVERSED)
            yield begin, _reach(text, end, form[offset + len(piece) :], _BREAK)


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def _reach(text: str, place: int, rest: str, line_break: re.Pattern[str]) -> int:
    """How far a text goes on as `rest` does, line breaks in it passed over."""
    for character in rest:
        if text.startswith(character, place):
            place += 1
            continue
        match = line_break.match(text, place)
        if match is None or not text.startswith(character, match.end()):
            break
        place = match.end() + 1
    return place


NO_SECRETS = Mask(())
_remembered: set[str] = set()


def remember(secrets: Iterable[str]) -> None:
    """Have secrets masked, in this process, in every text that is about to be cut; ordinary words are none."""
    new = {secret for secret in secrets if is_secret(secret)} - _remembered
    if new:
        _remembered.update(new)
        mask_before_cutting(remembered_mask().text)


def remembered_mask() -> Mask:
    """The mask of all secrets that this process has been told of."""
    return Mask(_remembered)


@lru_cache(maxsize=16)
def mask_of(secrets: tuple[str, ...]) -> Mask:
    """The mask of some secrets, made once. They are remembered."""
    remember(secrets)
    return Mask(secrets)
