"""Groq: `reasoning_effort` of other levels for each family; models that do not reason refuse the field.

Source: https://console.groq.com/docs/reasoning
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import EffortDialect


class Groq(EffortDialect):
    """api.groq.com"""

    HOSTS = ("api.groq.com",)

    def levels(self) -> tuple[str, ...]:
        """By the model's name; Qwen knows on and off."""
        return ("low", "medium", "high") if "gpt-oss" in self.settings.model else ()

    def change_request(self, request: ModelRequest) -> None:
        """The level, or Qwen's own two words."""
        super().change_request(request)
        reasoning = self.settings.reasoning
        if self._is_switch and reasoning.enabled is not None:
            request.fields["reasoning_effort"] = "none" if reasoning.is_off else "default"

    def note(self) -> str:
        """A level is as good as on for Qwen."""
        return self.note_of_switch("'default'") if self._is_switch else super().note()

    @property
    def _is_switch(self) -> bool:
        return "qwen" in self.settings.model
