"""Google's OpenAI-compatible endpoint: `reasoning_effort`; only 2.5 Flash can be switched off.

Source: https://ai.google.dev/gemini-api/docs/openai (thinking); the signatures of thoughts, which go back with the tool
calls that they belong to, are kept by `replies`.
"""

from promptmill.quirks.efforts import EffortDialect


class Gemini(EffortDialect):
    """generativelanguage.googleapis.com"""

    HOSTS = ("generativelanguage.googleapis.com",)

    def levels(self) -> tuple[str, ...]:
        """By the model's name."""
        if "2.5-flash" in self.settings.model:
            return ("none", "low", "medium", "high")
        return ("low", "medium", "high")
