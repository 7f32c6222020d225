"""Moonshot's Kimi: K3 takes `reasoning_effort`, K2.x a switch; reasoning goes back as `reasoning_content`.

K3 and K2.7 always reason. Unknown fields and levels are ignored there without a word, so what is not known is not sent.

Sources: https://platform.kimi.ai/docs/guide/use-thinking-effort, https://platform.kimi.ai/docs/guide/use-kimi-k2-thinking-model
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import EffortDialect, with_reasoning
from promptmill.records import ModelReply


class Moonshot(EffortDialect):
    """api.moonshot.ai and api.moonshot.cn"""

    HOSTS = ("api.moonshot.ai", "api.moonshot.cn", "api.kimi.com")

    def levels(self) -> tuple[str, ...]:
        """By the model's name."""
        return ("low", "high", "max") if "kimi-k3" in self.settings.model else ()

    def change_request(self, request: ModelRequest) -> None:
        """The level, or the switch."""
        super().change_request(request)
        if self._is_switch and self.settings.reasoning.enabled is not None:
            request.fields["thinking"] = {"type": "disabled" if self.settings.reasoning.is_off else "enabled"}

    def note(self) -> str:
        """A level is as good as on for a switch."""
        return self.note_of_switch("'enabled'") if self._is_switch else super().note()

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Reasoning goes back as it came."""
        del request
        return with_reasoning(reply, "reasoning_content") if reply.message.reasoning else reply

    @property
    def _is_switch(self) -> bool:
        return any(name in self.settings.model for name in ("kimi-k2.5", "kimi-k2.6"))
