"""Hosts that nothing is known of: `reasoning_effort` as it was asked for, which most imitators of OpenAI take."""

from promptmill.config import ModelSettings
from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import Dialect, asked_for


class OtherHost(Dialect):
    """Whatever no other dialect is for."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        del settings
        return True

    def change_request(self, request: ModelRequest) -> None:
        """The level as it was asked for; `none` for off."""
        reasoning = self.settings.reasoning
        if reasoning.enabled is not None:
            request.fields["reasoning_effort"] = "none" if reasoning.is_off else reasoning.effort or "medium"

    def note(self) -> str:
        """It may be ignored."""
        reasoning = self.settings.reasoning
        return f"{asked_for(reasoning)} is sent as `reasoning_effort`; whether {self.where} heeds it is not known"
