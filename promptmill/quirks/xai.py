"""xAI: `reasoning_effort` for some models; the others refuse the field.

Source: https://docs.x.ai/docs/guides/reasoning
"""

import re

from promptmill.quirks.efforts import EffortDialect


class XAI(EffortDialect):
    """api.x.ai"""

    HOSTS = ("api.x.ai",)

    def levels(self) -> tuple[str, ...]:
        """By the model's name."""
        model = self.settings.model
        if "grok-3-mini" in model:
            return ("low", "high")
        if re.search(r"grok-4\.3(?!\d)", model):
            return ("none", "low", "medium", "high")
        return ("low", "medium", "high", "xhigh") if re.search(r"grok-(4\.[4-9]|[5-9])(?!\d)", model) else ()
