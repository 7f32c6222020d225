"""Reasoning and answer of an assistant message, from every form in use, each thought once.

Reasoning stands in `reasoning`, `reasoning_content`, `thinking`, `reasoning_details`, `thinking_blocks`, in parts of
the content, and in tags at the start of the text. Many endpoints give the same twice (a field and its details, or a
field and the tags it was cut from), with other white space or slightly cut: what is nearly contained in what is known
already is left out, anything else is added. What was in tags is taken out of the text; nothing else is.

The tags
    <think>why</think>so        reasoning, when it opens the text; the same for the other names
    <think>a</think><think>b</think>so
                                reasoning, one block after another
    <think>a<think>b</think>c</think>so
                                one block: a tag that was opened again is closed again
    why</think>so               reasoning too: chat templates open the tag themselves, and vLLM or SGLang without a
                                reasoning parser give what the model wrote after it
    <think>why                  reasoning that never came to an answer; but text, where the reasoning is known already
    so <think>x</think>         text: an answer may speak of the tag

Each step through a text is taken once, however many tags it has.

Sources: https://docs.vllm.ai/en/stable/features/reasoning_outputs/, https://openrouter.ai/docs/use-cases/reasoning-tokens,
https://docs.mistral.ai/capabilities/reasoning/.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAMES = "think|thinking|thought|reasoning|reasoning_scratchpad|seed:think"
_TAG = re.compile(rf"<(/?)({_NAMES})>|\[(/?)THINK\]", re.IGNORECASE)
_SQUARE = "[think]"
_LONE = frozenset({"think", "thinking", "reasoning_scratchpad", "seed:think", _SQUARE})
"""Tags that may close what was opened before the text began, or under another name; the others are words as well."""
_WORD = re.compile(r"\w+")
_QUOTES = "`\"' "
"""On both sides of a tag: the text speaks of it."""
SAME_WORDS = 0.9
"""Two texts with this share of the words of the shorter one in common are the same thought."""
MIN_COMPARED_WORDS = 8
"""Shorter texts are the same only where one contains the other."""
MIN_COMPARED_CHARS = 40
"""Shorter texts are contained in others only as whole words."""

DETAIL_FIELDS = ("reasoning_details", "thinking_blocks")
THINKING_PARTS = frozenset({"thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary_text"})


def split_reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
    """Reasoning and answer text of an assistant message, without white space around."""
    content = message.get("content")
    fields = (
        text_of(message.get("reasoning")),
        text_of(message.get("reasoning_content")),
        text_of(message.get("thinking")),
        *(_details_text(message.get(name)) for name in DETAIL_FIELDS),
        _details_text(thinking_parts(content)),
    )
    known = _united(fields)
    tagged, text = split_tags(text_of(content), known)
    return _united((known, tagged)), text


def split_tags(text: str, known: str = "") -> tuple[str, str]:
    """Reasoning in tags at the start of a text, and the rest.

    Args:
        text: What the model wrote.
        known: Reasoning that is known from elsewhere: what no tag opens or none closes must then be the same.
    """
    tags = _tags(text)
    blocks: list[str] = []
    place = number = 0
    lone = _lone_closing(tags)
    if lone is not None and (not known or _is_known(text[: tags[lone].start].strip(), known)):
        blocks.append(text[: tags[lone].start].strip())
        place, number = tags[lone].end, lone + 1
    while number < len(tags) and not text[place : tags[number].start].strip():
        tag = tags[number]
        if tag.is_closing:
            if tag.name not in _LONE:
                break
            closing: int | None = number
        else:
            closing = _closing_of(tags, number)
            end = len(text) if closing is None else tags[closing].start
            thought = text[tag.end : end].strip()
            if _is_text(tags, closing, thought, known, blocks):
                break
            blocks.append(thought)
        place, number = (len(text), len(tags)) if closing is None else (tags[closing].end, closing + 1)
    return "\n\n".join(block for block in blocks if block), text[place:].strip()


def _is_text(tags: Sequence["_Tag"], closing: int | None, thought: str, known: str, blocks: Sequence[str]) -> bool:
    """Whether an answer begins with a tag that it speaks of: its reasoning is known, and this is something else."""
    if closing is None:
        before = "\n".join([known, *blocks]).strip()
        return bool(before) and not _is_known(thought, before)
    return bool(known) and not blocks and tags[closing].is_quoted and not _is_known(thought, known)


@dataclass(slots=True)
class _Tag:
    """A tag of reasoning somewhere in a text."""

    start: int
    end: int
    name: str
    is_closing: bool
    is_quoted: bool
    partner: int | None = None
    """Number of the tag that closes this one, tags in between counted; None where there is none."""
    next_closing: int | None = None
    """Number of the next tag that closes any of this name, else of the next that may close another one."""


def _tags(text: str) -> list[_Tag]:
    """All tags of a text, each with what may close it."""
    tags: list[_Tag] = []
    opened: dict[str, list[_Tag]] = {}
    fences = place = 0
    for number, match in enumerate(_TAG.finditer(text)):
        fences += text.count("```", place, match.start())
        place = match.end()
        before, after = text[match.start() - 1 : match.start()], text[place : place + 1]
        is_quoted = fences % 2 == 1 or (before == after and before != "" and before in _QUOTES)
        name = match[2].lower() if match[2] else _SQUARE
        tag = _Tag(match.start(), place, name, bool(match[1] or match[3]), is_quoted)
        tags.append(tag)
        if is_quoted:
            continue
        if not tag.is_closing:
            opened.setdefault(name, []).append(tag)
        elif opened.get(name):
            opened[name].pop().partner = number
    following: dict[str, int] = {}
    lone: int | None = None
    for number in range(len(tags) - 1, -1, -1):
        tag = tags[number]
        tag.next_closing = following.get(tag.name, lone)
        if tag.is_closing:
            following[tag.name] = number
            lone = number if tag.name in _LONE else lone
    return tags


def _closing_of(tags: Sequence[_Tag], opening: int) -> int | None:
    """Number of the tag that ends a block: the next one, or a later one where the tag was opened again before it."""
    first = tags[opening].next_closing
    if first is None:
        return None
    inner = (tags[number] for number in range(opening + 1, first))
    is_nested = any(tag.name == tags[opening].name and not tag.is_quoted for tag in inner)
    return tags[opening].partner or first if is_nested else first


def _lone_closing(tags: Sequence[_Tag]) -> int | None:
    """Number of the tag that closes what was opened before the text began; one within quotes or code is quoted."""
    for number, tag in enumerate(tags):
        if not tag.is_closing:
            return None
        if tag.name in _LONE:
            return None if tag.is_quoted else number
    return None


def _united(texts: Iterable[str]) -> str:
    """Texts as paragraphs, without those that are nearly contained in another."""
    kept: list[str] = []
    for text in (text.strip() for text in texts):
        if not text or any(_is_known(text, other) for other in kept):
            continue
        kept = [other for other in kept if not _is_known(other, text)] + [text]
    return "\n\n".join(kept)


def _is_known(text: str, other: str) -> bool:
    """Whether a text is contained in another one, but for white space and a few words."""
    squeezed, other_squeezed = "".join(text.split()), "".join(other.split())
    if squeezed == other_squeezed or (len(squeezed) >= MIN_COMPARED_CHARS and squeezed in other_squeezed):
        return True
    words, other_words = _WORD.findall(text), _WORD.findall(other)
    if f" {' '.join(words)} " in f" {' '.join(other_words)} ":
        return bool(words)
    if len(words) < MIN_COMPARED_WORDS or len(other_words) > 2 * len(words):
        return False
    common = Counter(words) & Counter(other_words)
    return common.total() >= SAME_WORDS * len(words)


def text_of(value: object) -> str:
    """A text, or the text of a list of parts, those of reasoning left out."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return ""
    texts = (_part_text(part) for part in value)
    return "".join(text for text in texts if isinstance(text, str))


def _part_text(part: object) -> object:
    if isinstance(part, dict):
        return None if _is_thinking(part) else part.get("text")
    return part


def thinking_parts(content: object) -> list[dict[str, Any]]:
    """The parts of a content list that are reasoning."""
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, dict) and _is_thinking(part)]


def _is_thinking(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in THINKING_PARTS


def _details_text(details: object) -> str:
    if not isinstance(details, list):
        return ""
    texts = (_detail_text(detail) for detail in details if isinstance(detail, dict))
    return "\n\n".join(text for text in texts if text.strip())


def _detail_text(detail: Mapping[str, Any]) -> str:
    for name in ("text", "summary", "thinking", "reasoning", "content"):
        value = detail.get(name)
        text = value if isinstance(value, str) else _nested_text(value)
        if text.strip():
            return text
    return ""


def _nested_text(value: object) -> str:
    """Mistral's and OpenAI's lists of text parts within a part of reasoning."""
    parts = value if isinstance(value, list) else ()
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
