"""What one model family or server does differently: one file each, chosen by endpoint and model.

Registries: name -> "module:Class". Of the dialects, which say how reasoning is asked for, the first that applies is
used; of the others all that apply, in this order for a request and reversed for a reply.
"""

from importlib import import_module

from promptmill.config import ModelSettings
from promptmill.quirks.base import Quirk

DIALECTS: dict[str, str] = {
    "openrouter": "promptmill.quirks.openrouter:OpenRouter",
    "openai": "promptmill.quirks.openai:OpenAI",
    "deepseek": "promptmill.quirks.deepseek:DeepSeek",
    "qwen": "promptmill.quirks.qwen:Qwen",
    "anthropic": "promptmill.quirks.anthropic:Anthropic",
    "gemini": "promptmill.quirks.gemini:Gemini",
    "mistral": "promptmill.quirks.mistral:Mistral",
    "xai": "promptmill.quirks.xai:XAI",
    "groq": "promptmill.quirks.groq:Groq",
    "moonshot": "promptmill.quirks.moonshot:Moonshot",
    "zai": "promptmill.quirks.zai:ZAI",
    "own_server": "promptmill.quirks.own_server:OwnServer",
    "other_host": "promptmill.quirks.other_host:OtherHost",
}
QUIRKS: dict[str, str] = {
    "openai_fields": "promptmill.quirks.openai_fields:OpenAIFields",
    "schema_calls": "promptmill.quirks.schema_calls:SchemaCalls",
}


def quirks_for(settings: ModelSettings) -> tuple[Quirk, ...]:
    """The quirks that apply to a model at an endpoint."""
    dialect = next(quirk for quirk in map(_load, DIALECTS.values()) if quirk.applies(settings))
    others = (quirk for quirk in map(_load, QUIRKS.values()) if quirk.applies(settings))
    return tuple(quirk(settings) for quirk in (dialect, *others))


def _load(path: str) -> type[Quirk]:
    module, _, attribute = path.partition(":")
    quirk: type[Quirk] = getattr(import_module(module), attribute)
    return quirk
