"""The contract of a quirk: change a request before it is encoded, and a reply after it is read; say what is lost."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from promptmill.config import ModelSettings
from promptmill.records import Message, ModelReply


@dataclass(slots=True)
class ModelRequest:
    """One model call before it is encoded. A quirk may replace any part of it, never change a message in place."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    """Tool schemas as the chat-completions API wants them; empty when no tools are offered."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Everything else of the body: `model`, `max_tokens`, …"""


class Quirk(ABC):
    """One difference. Made once per client, used for all its calls; keeps no state between calls."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings

    @classmethod
    @abstractmethod
    def applies(cls, settings: ModelSettings) -> bool:
        """Whether this model at this endpoint has the quirk."""

    def notes(self) -> list[str]:
        """What was asked for that this endpoint does not know, and what is done instead; said once, at the start."""
        return []

    def change_request(self, request: ModelRequest) -> None:
        """Change a request in place before it is encoded."""
        del request

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """The reply as the agent should see it; `request` is the one this quirk changed."""
        del request
        return reply
