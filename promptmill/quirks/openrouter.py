"""OpenRouter: provider routing, its `reasoning` object, which it maps to what each provider knows, and what goes back.

Sources: https://openrouter.ai/docs/features/provider-routing, https://openrouter.ai/docs/use-cases/reasoning-tokens
(`reasoning_details` go back unchanged, which `replies` sees to; where a model gave only text, the text does).
"""

from typing import Any

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import Dialect, with_reasoning
from promptmill.records import ModelReply


class OpenRouter(Dialect):
    """Requests to openrouter.ai."""

    HOSTS = ("openrouter.ai",)

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

    def note(self) -> str:
        """All levels are sent as they are."""
        return ""

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Reasoning goes back with the tool calls that it led to."""
        del request
        message = reply.message
        needs_it = message.reasoning and message.tool_calls and "reasoning_details" not in message.echo
        return with_reasoning(reply, "reasoning") if needs_it else reply
