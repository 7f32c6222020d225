"""DeepSeek: a switch `thinking`, `reasoning_effort`, and reasoning that must go back in a conversation with tools.

It maps all our levels to its own (minimal and low to low, medium to xhigh to high, max and ultra to max), so they are
sent as they are. Without the `reasoning_content` of a turn that called tools the next request is refused with 400.

Source: https://api-docs.deepseek.com/guides/thinking_mode
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import SwitchDialect, with_reasoning
from promptmill.records import ModelReply


class DeepSeek(SwitchDialect):
    """api.deepseek.com"""

    HOSTS = ("api.deepseek.com",)

    def change_request(self, request: ModelRequest) -> None:
        """The switch, and the level where one was asked for."""
        super().change_request(request)
        if self.settings.reasoning.effort:
            request.fields["reasoning_effort"] = self.settings.reasoning.effort

    def note(self) -> str:
        """All levels are known."""
        return ""

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Reasoning goes back as it came; the field must be there even when it was empty."""
        del request
        return reply if self.settings.reasoning.is_off else with_reasoning(reply, "reasoning_content")
