"""What one model family or server does differently: one file each, chosen by endpoint and model.

Registry: name -> "module:Class", in the order in which they are applied to a request (and, reversed, to a reply).
"""

from importlib import import_module

from promptmill.config import ModelSettings
from promptmill.quirks.base import Quirk

QUIRKS: dict[str, str] = {
    "openrouter": "promptmill.quirks.openrouter:OpenRouter",
    "openai_fields": "promptmill.quirks.openai_fields:OpenAIFields",
    "schema_calls": "promptmill.quirks.schema_calls:SchemaCalls",
}


def quirks_for(settings: ModelSettings) -> tuple[Quirk, ...]:
    """The quirks that apply to a model at an endpoint."""
    chosen = []
    for path in QUIRKS.values():
        module, _, attribute = path.partition(":")
        quirk = getattr(import_module(module), attribute)
        if quirk.applies(settings):
            chosen.append(quirk(settings))
    return tuple(chosen)
