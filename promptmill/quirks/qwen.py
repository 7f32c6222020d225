"""Qwen at Alibaba's Model Studio (DashScope): `enable_thinking`, on or off.

Source: https://help.aliyun.com/en/model-studio/deep-thinking (also: most of its models think only in a streamed reply)
"""

from promptmill.quirks.base import ModelRequest
from promptmill.quirks.efforts import Dialect


class Qwen(Dialect):
    """dashscope.aliyuncs.com and its regions."""

    HOSTS = ("dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com", "dashscope-us.aliyuncs.com", "maas.aliyuncs.com")

    def change_request(self, request: ModelRequest) -> None:
        """Switch thinking on or off."""
        if self.settings.reasoning.enabled is not None:
            request.fields["enable_thinking"] = not self.settings.reasoning.is_off

    def note(self) -> str:
        """A level is as good as on; thinking may need a stream."""
        reasoning = self.settings.reasoning
        needs_stream = not reasoning.is_off and not self.settings.stream
        hint = "most models there think only in streamed replies: give --stream" if needs_stream else ""
        return "; ".join(part for part in (self.note_of_switch("on"), hint) if part)
