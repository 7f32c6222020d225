"""Fields of OpenAI's own chat API that are not those of its imitators, and OpenRouter's that no other endpoint knows.

Source: https://platform.openai.com/docs/api-reference/chat/create (`max_tokens` is deprecated there and refused by
reasoning models).
"""

import re
from dataclasses import astuple

from promptmill.config import ModelSettings
from promptmill.quirks.base import ModelRequest, Quirk
from promptmill.quirks.openai import OpenAI
from promptmill.quirks.openrouter import OpenRouter

_REASONING_MODEL = re.compile(r"(^|/)(o\d|gpt-[5-9])")


class OpenAIFields(Quirk):
    """Any endpoint but OpenRouter: `max_completion_tokens` where it is needed; no provider routing."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return not OpenRouter.applies(settings)

    def change_request(self, request: ModelRequest) -> None:
        """Rename `max_tokens` for OpenAI and its reasoning models, wherever they are served."""
        needs_it = OpenAI.applies(self.settings) or _REASONING_MODEL.search(self.settings.model)
        if "max_tokens" in request.fields and needs_it:
            request.fields["max_completion_tokens"] = request.fields.pop("max_tokens")

    def notes(self) -> list[str]:
        """Routing that was asked for."""
        if not any(astuple(self.settings.routing)):
            return []
        host = self.settings.endpoint.host or "the embedded server"
        return [f"The provider flags are not sent: {host} is not OpenRouter, and has no providers to choose from"]
