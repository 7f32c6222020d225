"""Between the command line and a door's `main`: checks what was typed, answers `--help`, then lets Fire call `main`.

The only importer of Fire.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fire
from fire.decorators import SetParseFn

from promptmill.config import environment
from promptmill.errors import ConfigError
from promptmill.escaping import escaped
from promptmill.flags import Flag, help_text, normalise_argv
from promptmill.logs import log_to_stderr
from promptmill.resources import raise_descriptor_limit
from promptmill.secrets import remember, remembered_mask, secrets_in, secrets_typed

DONE, INCOMPLETE, BAD_USAGE = 0, 1, 2
"""Exit codes; 128 + N stands for signal N."""


def open_door(main: Callable[..., None], argv: Sequence[str], flags: Sequence[Flag], usage: str, summary: str) -> None:
    """Call `main` with the flags that were typed, each as the string that it was.

    Args:
        main: Has one parameter per flag, of the flag's name; parses the strings by the flags' own parsers.
        argv: The words after the command's name.
        flags: Every flag the command has.
        usage: First line of `--help`, e.g. `python batch_runner.py --dataset_file=FILE --run_name=NAME`.
        summary: What the command does, in a line.

    Raises:
        SystemExit: with 2 for an unknown flag, a stray word or a refused value, before `main` is called.
    """
    open_closed_streams()
    remember(secrets_typed(argv))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a model wrote may not fit the terminal's encoding, and must not end the command.
            stream.reconfigure(errors="backslashreplace")
    if "--help" in argv or "-h" in argv or list(argv) == ["help"]:
        print_answer(help_text(usage, summary, flags))
        return
    flag_by_name = {flag.name: flag for flag in flags}
    try:
        given = normalise_argv(argv, flag_by_name)
        parsed_options(given, flag_by_name)
    except ConfigError as exc:
        sys.exit(complain(exc, BAD_USAGE))
    log_to_stderr()
    raise_descriptor_limit()
    # Fire would turn 2024_01 into a number and null into None: it gets strings, and passes them on as they are.
    try:
        fire.Fire(SetParseFn(str)(main), command=[f"--{name}={value}" for name, value in given.items()])
    except KeyboardInterrupt:  # while it was still importing; later ones are the command's own to handle
        sys.exit(128 + signal.SIGINT)


def open_closed_streams() -> None:
    """Give standard streams that were closed (`2>&-`) to the null device, before other files take their places."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: PTH123, SIM115


def parsed_options(given: Mapping[str, Any], flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Values as typed (or of their own type, from a script) -> parsed; None is left out. Raises ConfigError."""
    return {name: flags[name].parse(name, value) for name, value in given.items() if value is not None}


def print_answer(text: str) -> None:
    """Print to standard output, and do not mind when nobody reads to the end (`… | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(exc: Exception, code: int) -> int:
    """Print an error to stderr, safe for a terminal and without secrets, and pass the exit code on."""
    remember(secrets_in(environment()))
    text = remembered_mask().text(f"error: {exc}")
    print("\n".join(escaped(line) for line in text.split("\n")), file=sys.stderr, flush=True)
    return code
