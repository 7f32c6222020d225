"""What the reasoning dialects share: levels of effort, the two most common fields, and reasoning that goes back.

A dialect sends nothing where nothing was asked for. What was asked for and is not known there is sent as the nearest
that is, and `notes` says so; it is never dropped in silence.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from promptmill.config import ModelSettings, Reasoning
from promptmill.quirks.base import ModelRequest, Quirk
from promptmill.records import ModelReply

ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")


def nearest_effort(reasoning: Reasoning, known: Sequence[str]) -> str:
    """The known level nearest to what was asked for, the stronger of two; "" where nothing was said, or none is known.

    Args:
        reasoning: What was asked for.
        known: The levels that can be sent, weakest first; `none` among them where reasoning can be switched off.
    """
    if reasoning.enabled is None or not known:
        return ""
    if reasoning.is_off:
        return known[0]
    asked = ORDER.index(reasoning.effort or "medium")
    levels = [level for level in known if level != "none"] or list(known)
    return min(levels, key=lambda level: (abs(ORDER.index(level) - asked), -ORDER.index(level)))


def asked_for(reasoning: Reasoning) -> str:
    """The flag that was given, as it is typed."""
    return "--reasoning_disabled" if reasoning.is_off else f"--reasoning_effort={reasoning.effort or 'medium'}"


def with_reasoning(reply: ModelReply, field: str) -> ModelReply:
    """The reply with its reasoning in a field of the message that goes back on later turns."""
    message = reply.message
    return replace(reply, message=replace(message, echo={**message.echo, field: message.reasoning}))


class Dialect(Quirk):
    """How one family of endpoints is told how much to reason. Of all dialects, the first that applies is used."""

    HOSTS: ClassVar[tuple[str, ...]] = ()
    """Domains of the family; hosts below them too."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return any(settings.endpoint.is_at(host) for host in cls.HOSTS)

    @property
    def where(self) -> str:
        """The model and its endpoint, for a note."""
        return f"{self.settings.model} at {self.settings.endpoint.host}"

    def notes(self) -> list[str]:
        """That there is no control, or what is sent instead of what was asked for."""
        if self.settings.reasoning.enabled is None:
            return []
        note = self.note()
        return [note] if note else []

    @abstractmethod
    def note(self) -> str:
        """The one note where something was asked for; "" where it is sent as it was."""

    def note_of_switch(self, sent: str) -> str:
        """The note of an endpoint that knows on and off only, for which any level is as good as on."""
        reasoning = self.settings.reasoning
        return (
            f"{asked_for(reasoning)} is sent as {sent}: {self.where} knows on and off only" if reasoning.effort else ""
        )


class EffortDialect(Dialect):
    """Families that take `reasoning_effort`, each model some of its levels."""

    @abstractmethod
    def levels(self) -> tuple[str, ...]:
        """The levels that the model takes, weakest first; empty where it has no such control."""

    def change_request(self, request: ModelRequest) -> None:
        """Send the nearest level."""
        level = nearest_effort(self.settings.reasoning, self.levels())
        if level:
            request.fields["reasoning_effort"] = level

    def note(self) -> str:
        """Where the nearest level is another than what was asked for."""
        reasoning, levels = self.settings.reasoning, self.levels()
        if not levels:
            return f"{asked_for(reasoning)} is not sent: {self.where} has no control of reasoning"
        level = nearest_effort(reasoning, levels)
        if level == ("none" if reasoning.is_off else reasoning.effort or "medium"):
            return ""
        return f"{asked_for(reasoning)} is sent as {level!r}: {self.where} knows {', '.join(levels)}"


class SwitchDialect(Dialect):
    """Families that take `thinking: {"type": "enabled" or "disabled"}` and know no levels."""

    def change_request(self, request: ModelRequest) -> None:
        """Switch reasoning on or off."""
        if self.settings.reasoning.enabled is not None:
            request.fields["thinking"] = {"type": "disabled" if self.settings.reasoning.is_off else "enabled"}

    def note(self) -> str:
        """A level is as good as on."""
        return self.note_of_switch("'enabled'")
