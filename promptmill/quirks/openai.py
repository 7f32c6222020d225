"""OpenAI itself, and Azure: `reasoning_effort`, of which each model takes other levels, and some none.

Sources: https://platform.openai.com/docs/api-reference/chat/create (`reasoning_effort`),
https://learn.microsoft.com/en-us/python/api/azure-ai-projects/azure.ai.projects.models.reasoningeffort (which models
take which levels).
"""

import re

from promptmill.quirks.efforts import EffortDialect

_LEVELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^o\d", ("low", "medium", "high")),
    (r"^gpt-5(-|$)", ("minimal", "low", "medium", "high")),
    (r"^gpt-5\.1", ("none", "low", "medium", "high")),
    (r"^gpt-(5\.|[6-9]|\d\d)", ("none", "low", "medium", "high", "xhigh")),
)
"""The first that fits decides."""


class OpenAI(EffortDialect):
    """api.openai.com and deployments of Azure."""

    HOSTS = ("api.openai.com", "openai.azure.com", "services.ai.azure.com")

    def levels(self) -> tuple[str, ...]:
        """By the model's name; one that does not reason takes none."""
        return next((levels for pattern, levels in _LEVELS if re.search(pattern, self.settings.model)), ())

    def notes(self) -> list[str]:
        """Say too that a model that reasons keeps its reasoning to itself."""
        silent = f"{self.where} returns no text of its reasoning: only --keep_no_reasoning keeps rows without any"
        return [*super().notes(), *([silent] if self.levels() and not self.settings.reasoning.is_off else [])]
