"""Where the house's own log records go: to stderr, safe for a terminal; and how secrets are kept out of them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from promptmill.escaping import escaped
from promptmill.secrets import NO_SECRETS, Mask

LOGGERS = ("promptmill", "toolsets")


class EscapingFormatter(logging.Formatter):
    """A traceback may hold what a model or a tool wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(escaped(line) for line in super().format(record).split("\n"))


class MaskingFilter(logging.Filter):
    """Takes secrets out of a record, its traceback included, whatever handles it afterwards."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self._mask = mask

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record where it holds a secret; lets every record pass."""
        message = record.getMessage()
        masked = self._mask.text(message)
        if masked != message:
            record.msg, record.args = masked, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        trace = record.exc_text or ""
        if self._mask.text(trace) != trace:
            record.exc_text, record.exc_info = self._mask.text(trace), None
        return True


def log_to_stderr(mask: Mask = NO_SECRETS) -> None:
    """Show warnings and errors of the house. For commands and worker processes; a script sets up its own logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(MaskingFilter(mask))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False


@contextmanager
def masked_records(mask: Mask) -> Iterator[None]:
    """Keep secrets out of the house's records, whoever set up the logging, until the block ends."""
    masking = MaskingFilter(mask)
    # A logger's filter does not see what its children log, and a handler's would miss the handlers of others.
    names = (name for name in logging.root.manager.loggerDict if name.partition(".")[0] in LOGGERS)
    filtered: list[logging.Filterer] = [logging.getLogger(name) for name in (*names, *LOGGERS)]
    filtered += [handler for name in LOGGERS for handler in logging.getLogger(name).handlers]
    for each in filtered:
        each.addFilter(masking)
    try:
        yield
    finally:
        for each in filtered:
            each.removeFilter(masking)
