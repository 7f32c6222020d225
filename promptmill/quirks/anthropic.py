"""Anthropic's chat completions: `thinking` with a budget of tokens; `reasoning_effort` is ignored there.

The text of the thinking is not returned, whatever is asked for: rows have reasoning only through an endpoint that
returns it, such as OpenRouter.

Sources: https://docs.anthropic.com/en/api/openai-sdk, https://docs.anthropic.com/en/docs/build-with-claude/adaptive-thinking
(newer models decide themselves how much they think).
"""

import re
from typing import Any

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import Dialect, asked_for

BUDGET_TOKENS = {
    "minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 24576, "max": 32000, "ultra": 32000,
}  # fmt: skip
MIN_BUDGET_TOKENS = 1024

_ADAPTIVE = re.compile(r"claude-\w+-(4-[6-9]|[5-9])(?!\d)")


class Anthropic(Dialect):
    """api.anthropic.com"""

    HOSTS = ("api.anthropic.com",)

    def change_request(self, request: ModelRequest) -> None:
        """The budget of the level that was asked for, below the reply's own limit."""
        thinking = self._thinking()
        if thinking:
            request.fields["thinking"] = thinking

    def _thinking(self) -> dict[str, Any] | None:
        reasoning = self.settings.reasoning
        if reasoning.enabled is None:
            return None
        if reasoning.is_off:
            return {"type": "disabled"}
        if _ADAPTIVE.search(self.settings.model):
            return {"type": "adaptive"}
        budget = BUDGET_TOKENS[reasoning.effort or "medium"]
        if self.settings.max_tokens is not None:
            budget = min(budget, self.settings.max_tokens - 1)
        return {"type": "enabled", "budget_tokens": budget} if budget >= MIN_BUDGET_TOKENS else None

    def note(self) -> str:
        """What becomes of the level, and that no text comes back."""
        if self.settings.reasoning.is_off:
            return ""
        asked, thinking = asked_for(self.settings.reasoning), self._thinking()
        if thinking is None:
            return f"{asked} is not sent: {self.where} needs --max_tokens above {MIN_BUDGET_TOKENS} to think"
        sent = thinking.get("budget_tokens")
        how = f"a budget of {sent} tokens" if sent else "'adaptive', which knows no levels"
        return f"{asked} is sent as {how}; {self.where} does not return the text of its thinking"
