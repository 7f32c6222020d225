"""Look at or work on the folder of a run that exists.

    python -m promptmill export data/my_run --format=hermes
    python -m promptmill merge data/my_run
    python -m promptmill stats data/my_run

Exit codes: 0 done; 1 could not; 2 bad usage; 130 and 143 for SIGINT and SIGTERM.
"""

import signal
import sys
from collections.abc import Sequence

from promptmill.door import BAD_USAGE, DONE, INCOMPLETE, complain, parsed_options, print_answer
from promptmill.errors import ConfigError, RunStoppedError, UsageError
from promptmill.flags import help_text, normalise_argv
from promptmill.verbs import VERBS, existing_run, verb_named

COMMAND = "python -m promptmill"
SUMMARY = "Look at or work on the folder of a run that exists."


def main(argv: Sequence[str]) -> int:
    """Do what was typed; returns the exit code."""
    try:
        _obey(argv)
    except UsageError as exc:
        return complain(exc, BAD_USAGE)
    except RunStoppedError as exc:
        return complain(exc, INCOMPLETE)
    except OSError as exc:
        return complain(OSError(f"{exc.filename}: {exc.strerror}"), INCOMPLETE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return DONE


def _obey(argv: Sequence[str]) -> None:
    if not argv or argv[0].startswith("-") and argv[0] not in ("--help", "-h"):
        raise ConfigError(f"give a verb first, e.g. {COMMAND} stats data/my_run; known: {', '.join(VERBS)}")
    name, *words = argv
    if name in ("--help", "-h", "help"):
        print_answer(_help())
        return
    verb = verb_named(name)
    usage = f"{COMMAND} {name} data/my_run {verb.usage}".rstrip()
    if "--help" in words or "-h" in words or words == ["help"]:
        print_answer(help_text(usage, f"{verb.summary}.", verb.flags))
        return
    if not words or words[0].startswith("-"):
        raise ConfigError(f"give the run folder right after the verb: {usage}")
    flag_by_name = {flag.name: flag for flag in verb.flags}
    given = parsed_options(normalise_argv(words[1:], flag_by_name), flag_by_name)
    verb.run(existing_run(words[0]), {flag.name: flag.default for flag in verb.flags} | given)


def _help() -> str:
    entries = [f"  {name:<10}{verb.summary}" for name, verb in VERBS.items()]
    opening = help_text(f"{COMMAND} VERB data/my_run [--flag=value ...]", SUMMARY, ())
    return "\n".join([opening, "", "Verbs:", *entries, "", f"`{COMMAND} VERB --help` shows the flags of one."])


def _terminate(_number: int, _frame: object) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)  # so that a half-written file is removed
    sys.exit(main(sys.argv[1:]))
