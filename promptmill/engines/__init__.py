"""Where workers run. Registry: name -> "module:Class"."""

from importlib import import_module

from promptmill.engines.base import Engine
from promptmill.errors import ConfigError

ENGINES: dict[str, str] = {
    "processes": "promptmill.engines.processes:ProcessEngine",
    "inline": "promptmill.engines.inline:InlineEngine",
}


def engine_class(name: str) -> type[Engine]:
    """The engine of a name. Raises ConfigError for an unknown one."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    engine: type[Engine] = getattr(import_module(module), attribute)
    return engine
