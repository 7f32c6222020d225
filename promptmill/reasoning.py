"""Reasoning and answer of an assistant message, from every form in use, each thought once.

Reasoning stands in `reasoning`, `reasoning_content`, `thinking`, `reasoning_details`, `thinking_blocks`, in parts of
the content, and in tags at the start of the text. Many endpoints give the same twice (a field and its details, or a
field and the tags it was cut from), with other white space or slightly cut: what is nearly contained in what is known
already is left out, anything else is added. What was in tags is taken out of the text; nothing else is.

The tags
    <think>why</think>so        reasoning, when it opens the text; the same for the other names
    why</think>so               reasoning too: chat templates open the tag themselves, and vLLM or SGLang without a
                                reasoning parser give what the model wrote after it
    <think>why                  reasoning that never came to an answer
    so <think>x</think>         text: an answer may speak of the tag

Sources: https://docs.vllm.ai/en/stable/features/reasoning_outputs/, https://openrouter.ai/docs/use-cases/reasoning-tokens,
https://docs.mistral.ai/capabilities/reasoning/.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = "think|thinking|thought|reasoning|reasoning_scratchpad|seed:think"
_CLOSED = re.compile(rf"\s*(?:<({_NAMES})>(.*?)</\1>|\[THINK\](.*?)\[/THINK\])\s*", re.DOTALL | re.IGNORECASE)
_OPEN = re.compile(rf"\s*(?:<({_NAMES})>|\[THINK\])", re.IGNORECASE)
_CLOSING = re.compile(r"</(?:think|thinking|reasoning_scratchpad|seed:think)>|\[/THINK\]", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_QUOTES = "`\"' "
"""On both sides of a tag: the text speaks of it."""
SAME_WORDS = 0.9
"""Two texts with this share of the words of the shorter one in common are the same thought."""
MIN_COMPARED_WORDS = 8
"""Shorter texts are the same only where one contains the other."""
MIN_COMPARED_CHARS = 40
"""Shorter texts are contained in others only as whole words."""

THINKING_PARTS = frozenset({"thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary_text"})


def split_reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
    """Reasoning and answer text of an assistant message, without white space around."""
    content = message.get("content")
    fields = (
        text_of(message.get("reasoning")),
        text_of(message.get("reasoning_content")),
        text_of(message.get("thinking")),
        _details_text(message.get("reasoning_details")),
        _details_text(message.get("thinking_blocks")),
        _details_text(thinking_parts(content)),
    )
    known = _united(fields)
    tagged, text = split_tags(text_of(content), known)
    return _united((known, tagged)), text


def split_tags(text: str, known: str = "") -> tuple[str, str]:
    """Reasoning in tags at the start of a text, and the rest.

    Args:
        text: What the model wrote.
        known: Reasoning that is known from elsewhere; what stands before a lone closing tag must then be the same.
    """
    blocks: list[str] = []
    rest = text
    while match := _CLOSED.match(rest):
        blocks.append((match[2] or match[3] or "").strip())
        rest = rest[match.end() :]
    if match := _OPEN.match(rest):
        # `<think>a</thinking>so`: another name closes it.
        closing = _CLOSING.search(rest, match.end())
        blocks.append(rest[match.end() : closing.start() if closing else len(rest)].strip())
        rest = rest[closing.end() :] if closing else ""
    elif closing := _lone_closing(rest):
        before = rest[: closing.start()].strip()
        was_nested = bool(blocks) and _OPEN.search(blocks[-1]) is not None
        if not before or was_nested or not (known or blocks) or _is_known(before, "\n".join([known, *blocks])):
            blocks.append(before)
            rest = rest[closing.end() :]
    return "\n\n".join(block for block in blocks if block), rest.strip()


def _lone_closing(text: str) -> re.Match[str] | None:
    """The closing tag of a block that was opened before the text began; one within quotes or code is quoted."""
    closing = _CLOSING.search(text)
    if closing is None or _OPEN.search(text, 0, closing.start()):
        return None
    before, after = text[: closing.start()], text[closing.end() :]
    is_quoted = bool(before) and before[-1] in _QUOTES and before[-1] == after[:1]
    return None if is_quoted or before.count("```") % 2 else closing


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
        return None if part.get("type") in THINKING_PARTS else part.get("text")
    return part


def thinking_parts(content: object) -> list[dict[str, Any]]:
    """The parts of a content list that are reasoning."""
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, dict) and part.get("type") in THINKING_PARTS]


def _details_text(details: object) -> str:
    if not isinstance(details, list):
        return ""
    texts = (_detail_text(item) for item in details if isinstance(item, dict))
    return "\n\n".join(text for text in texts if text.strip())


def _detail_text(item: Mapping[str, Any]) -> str:
    for name in ("text", "summary", "thinking", "reasoning", "content"):
        value = item.get(name)
        text = value if isinstance(value, str) else _nested_text(value)
        if text.strip():
            return text
    return ""


def _nested_text(value: object) -> str:
    """Mistral's and OpenAI's lists of text parts within a part of reasoning."""
    parts = value if isinstance(value, list) else ()
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
