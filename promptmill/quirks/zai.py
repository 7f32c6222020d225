"""Z.ai's GLM: a switch `thinking`; reasoning goes back as `reasoning_content` between tool calls.

Source: https://docs.z.ai/guides/capabilities/thinking-mode
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import SwitchDialect, with_reasoning
from promptmill.records import ModelReply


class ZAI(SwitchDialect):
    """api.z.ai and open.bigmodel.cn"""

    HOSTS = ("api.z.ai", "open.bigmodel.cn")

    def change_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Reasoning goes back as it came."""
        del request
        return with_reasoning(reply, "reasoning_content") if reply.message.reasoning else reply
