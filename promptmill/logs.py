"""Where the house's own log records go: to stderr, safe for a terminal."""

import logging

from promptmill.escaping import escaped

LOGGERS = ("promptmill", "toolsets")


class EscapingFormatter(logging.Formatter):
    """A traceback may hold what a model or a tool wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(escaped(line) for line in super().format(record).split("\n"))


def log_to_stderr() -> None:
    """Show warnings and errors of the house. For commands and worker processes; a script sets up its own logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
