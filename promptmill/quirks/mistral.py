"""Mistral: `reasoning_effort` of `none` or `high` for most models that reason by request; Magistral always does.

A request with a field that it does not know is refused, `stream_options` among them; usage ends each stream anyway.

Sources: https://docs.mistral.ai/capabilities/reasoning/ and /adjustable, https://docs.mistral.ai/api/#tag/chat
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import EffortDialect


class Mistral(EffortDialect):
    """api.mistral.ai"""

    HOSTS = ("api.mistral.ai",)

    def change_request(self, request: ModelRequest) -> None:
        """The level, and no field that is refused."""
        super().change_request(request)
        request.fields.pop("stream_options", None)

    def levels(self) -> tuple[str, ...]:
        """By the model's name."""
        if "magistral" in self.settings.model:
            return ()
        return ("low", "medium", "high") if "large-4" in self.settings.model else ("none", "high")
