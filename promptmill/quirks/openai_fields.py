"""Field names of OpenAI's own chat API, where they are not those of its imitators.

Source: https://platform.openai.com/docs/api-reference/chat/create (`max_tokens` is deprecated there and refused by
reasoning models; `reasoning_effort`).
"""

import re

from promptmill.config import ModelSettings
from promptmill.quirks.base import ModelRequest, Quirk
from promptmill.quirks.openrouter import OpenRouter

_REASONING_MODEL = re.compile(r"(^|/)(o\d|gpt-5)")


class OpenAIFields(Quirk):
    """Any endpoint but OpenRouter: `reasoning_effort` when asked for, `max_completion_tokens` where it is needed."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return not OpenRouter.applies(settings)

    def change_request(self, request: ModelRequest) -> None:
        """Rename `max_tokens` for OpenAI, and send the effort that was asked for."""
        own_host = self.settings.endpoint.host == "api.openai.com"
        if "max_tokens" in request.fields and (own_host or _REASONING_MODEL.search(self.settings.model)):
            request.fields["max_completion_tokens"] = request.fields.pop("max_tokens")
        reasoning = self.settings.reasoning
        if reasoning.is_off:
            request.fields["reasoning_effort"] = "none"
        elif reasoning.effort:
            request.fields["reasoning_effort"] = reasoning.effort
