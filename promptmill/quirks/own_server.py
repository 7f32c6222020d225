"""Servers of open models (vLLM, SGLang, llama.cpp): arguments of the model's chat template.

Which argument a template reads is the model's own: `enable_thinking` (Qwen3, GLM, Gemma 4, SmolLM3), `thinking`
(DeepSeek V3.1, Granite, Kimi), `reasoning_effort` (gpt-oss). Templates pass over what they do not read, so both
switches are sent. The field `reasoning_effort`, which these servers hand to the template too, is sent in the three
levels that all of them take; another would be refused.

Reasoning goes back in the field it came in, or as `reasoning_content`: templates that want it between tool calls find
it there, others pass over it.

Sources: https://docs.vllm.ai/en/stable/features/reasoning_outputs/,
https://docs.sglang.io/docs/advanced_features/thinking_budget, https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

import re
from typing import Any

from promptmill.config import ModelSettings, is_local_model
from promptmill.endpoints import is_private
from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import Dialect, asked_for, nearest_effort, with_reasoning
from promptmill.records import ModelReply

LEVELS = ("low", "medium", "high")
_OPEN_MODEL = re.compile(
    r"qwen-?3|qwq|glm-?[4-9]|deepseek|kimi|granite|gpt-oss|gemma-?[4-9]|smollm3|minimax-?m|nemotron|hunyuan|ernie|seed-oss",
    re.IGNORECASE,
)


class OwnServer(Dialect):
    """A private address, or an unknown host with an open model whose family is known."""

    @classmethod
    def applies(cls, settings: ModelSettings) -> bool:
        return is_private(settings.endpoint.host) or bool(_OPEN_MODEL.search(settings.model))

    @property
    def _always_reasons(self) -> bool:
        return "gpt-oss" in self.settings.model.lower()

    @property
    def _is_demonstration(self) -> bool:
        return self.settings.model == "local"

    def change_request(self, request: ModelRequest) -> None:
        """The template's arguments, and the level."""
        reasoning = self.settings.reasoning
        if reasoning.enabled is None or self._is_demonstration:
            return
        arguments: dict[str, Any] = {"enable_thinking": not reasoning.is_off, "thinking": not reasoning.is_off}
        if reasoning.effort or self._always_reasons:
            level = nearest_effort(reasoning, LEVELS)
            request.fields["reasoning_effort"] = level
            if self._always_reasons:
                arguments = {"reasoning_effort": level}
        request.fields["chat_template_kwargs"] = arguments

    def note(self) -> str:
        """Where the level is another, where reasoning cannot be switched off, where there is none."""
        reasoning = self.settings.reasoning
        asked = asked_for(reasoning)
        if self._is_demonstration:
            return f"{asked} is not sent: the demonstration model has no reasoning of its own to control"
        if reasoning.is_off:
            return f"{asked} is sent as 'low': gpt-oss cannot be switched off" if self._always_reasons else ""
        level = nearest_effort(reasoning, LEVELS)
        if level == (reasoning.effort or "medium"):
            return ""
        place = "the embedded server" if is_local_model(self.settings.model) else self.settings.endpoint.host
        return f"{asked} is sent as {level!r}: {place} is taken for a server that knows {', '.join(LEVELS)}"

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Reasoning of a turn with tool calls goes back; after an answer nothing does."""
        del request
        if not reply.message.reasoning or not reply.message.tool_calls or self._is_demonstration:
            return reply
        return with_reasoning(reply, reply.reasoning_field or "reasoning_content")
