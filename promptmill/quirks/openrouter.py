"""OpenRouter: provider routing, and its `reasoning` object.

Source: https://openrouter.ai/docs (provider routing, reasoning tokens).
"""

from typing import Any

from promptmill.config import ModelSettings
from promptmill.quirks.base import ModelRequest, Quirk


class OpenRouter(Quirk):
    """Requests to openrouter.ai."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return settings.endpoint.is_at("openrouter.ai")

    def change_request(self, request: ModelRequest) -> None:
        """Add `provider` where routing was asked for, and `reasoning` always: medium unless told otherwise."""
        routing = self.settings.routing
        provider: dict[str, Any] = {
            "only": list(routing.only),
            "ignore": list(routing.ignore),
            "order": list(routing.order),
            "sort": routing.sort,
        }
        provider = {name: value for name, value in provider.items() if value}
        if provider:
            request.fields["provider"] = provider
        reasoning = self.settings.reasoning
        if reasoning.is_off:
            request.fields["reasoning"] = {"enabled": False}
        else:
            request.fields["reasoning"] = {"enabled": True, "effort": reasoning.effort or "medium"}
