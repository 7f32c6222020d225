"""The table of options: one record per flag, from which parsing, `--help` and the configuration file are made.

Fire re-types values (`--run_name=2024_01` becomes a number), drops what it does not know only after the function
ran, and reads a stray word as the first parameter. So argv is checked and normalised here, before Fire sees it: every
flag becomes `--name=value`, spelt as typed, and Fire passes strings on.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promptmill.errors import ConfigError
from promptmill.retry import parse_retry

TRUE_WORDS = frozenset({"true", "yes", "1", "on"})
FALSE_WORDS = frozenset({"false", "no", "0", "off"})
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
PROVIDER_SORTS = ("price", "throughput", "latency")

FAILURE_WINDOW = 100
"""How many of the prompts that ended last a percentage of `--max_failures` is taken of."""
FAILURE_WINDOW_MIN = 20
"""How many must have ended before it is."""
MAX_DIGITS = 100
"""More than any number of ours needs, and fewer than `int` refuses."""

Parser = Callable[[str, Any], Any]


def boolean(name: str, value: object) -> bool:
    """`true/false/yes/no/1/0/on/off` in any case; raises ConfigError for anything else."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ConfigError(f"--{name} is {value!r}; give true or false (or yes, no, 1, 0)")


def text(name: str, value: object) -> str:
    """The string that was typed, whatever it looks like. A number in a configuration file is refused."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigError(f"--{name} is not valid UTF-8")
        return value
    shown = "a number or another kind of value" if name == "api_key" else repr(value)
    raise ConfigError(f"--{name} must be text, not {shown}; put it in quotes")


def name_list(name: str, value: object) -> tuple[str, ...]:
    """Comma-separated names, or a list of them; blanks around and empty names are dropped."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"--{name} is {value!r}; give names separated by commas")
    return tuple(text(name, part).strip() for part in parts if part.strip())


def one_of(choices: Sequence[str]) -> Parser:
    """A word of a closed set, in any case; empty is as good as not given."""

    def parse(name: str, value: object) -> str:
        word = str(value).strip().lower()
        if word in choices or not word:
            return word
        raise ConfigError(f"--{name} is {value!r}; known: {', '.join(choices)}{did_you_mean(word, choices)}")

    return parse


def integer(minimum: int, maximum: int = 2**31 - 1) -> Parser:
    """A whole number in a range; `1e3`, `1_000` and `10.0` are refused, for a typing slip must not pass."""

    def parse(name: str, value: object) -> int:
        number = value if isinstance(value, int) and not isinstance(value, bool) else _digits(str(value))
        if number is None:
            raise ConfigError(f"--{name} is {value!r}; give a whole number")
        if not minimum <= number <= maximum:
            raise ConfigError(f"--{name} is {number}; it must be between {minimum} and {maximum}")
        return number

    return parse


def count_or_all(name: str, value: object) -> int | None:
    """A count from 1, or `all` for no limit."""
    if str(value).strip().lower() in ("all", "none"):
        return None
    number: int = integer(1)(name, value)
    return number


def or_none(parser: Parser) -> Parser:
    """What a parser takes, or `none` for no limit."""

    def parse(name: str, value: object) -> Any:
        return None if str(value).strip().lower() in ("none", "") else parser(name, value)

    return parse


def count_or_percentage(name: str, value: object) -> int | str:
    """A count from 0, or a percentage such as `10%`, given back as text."""
    word = str(value).strip()
    try:
        if word.endswith("%"):
            return f"{decimal(0, 100)(name, word[:-1].strip()):g}%"
        count: int = integer(0)(name, value)
    except ConfigError as exc:
        raise ConfigError(f"--{name} is {value!r}; give a whole number from 0, or a percentage such as 10%") from exc
    return count


def price_pair(name: str, value: object) -> tuple[float, float]:
    """Two prices from 0, as `IN,OUT` or as a list."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ConfigError(f"--{name} is {value!r}; give two prices in US dollars, e.g. --{name}=3,15")
    prompt, completion = (decimal(0, 1e9)(name, part) for part in parts)
    return prompt, completion


def in_flight_limit(name: str, value: object) -> str | int:
    """`adaptive`, `off`, or a count up to which it adapts."""
    word = str(value).strip().lower()
    if word in ("adaptive", "off"):
        return word
    try:
        limit: int = integer(1)(name, value)
    except ConfigError as exc:
        raise ConfigError(f"--{name} is {value!r}; give adaptive, off, or a whole number from 1") from exc
    return limit


def decimal(minimum: float, maximum: float) -> Parser:
    """A number in a range."""

    def parse(name: str, value: object) -> float:
        try:
            number = float("nan") if isinstance(value, bool) or "_" in str(value) else float(str(value))
        except ValueError:
            number = float("nan")
        if not minimum <= number <= maximum:
            raise ConfigError(f"--{name} is {value!r}; give a number between {minimum:g} and {maximum:g}")
        return number

    return parse


def _digits(word: str) -> int | None:
    word = word.strip()
    body = word[1:] if word[:1] in "+-" else word
    return int(word) if body.isascii() and body.isdigit() and len(body) <= MAX_DIGITS else None


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    """The end of a complaint: the nearest of the known words, if one is near."""
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option."""

    name: str
    group: str
    default: Any
    """Value when the flag is given neither on the command line nor in a configuration file."""
    parse: Parser
    """(name, typed or configured value) -> value; raises ConfigError."""
    help: str
    shown_default: str = ""
    """What `--help` shows for the default, where the value itself would not tell."""
    placeholder: str = "TEXT"


RUN, CONVERSATION, MODEL, LIMITS, ROUTING, REASONING, ADVANCED = (
    "The run",
    "The conversation",
    "The model",
    "Limits",
    "Provider routing (OpenRouter)",
    "Reasoning",
    "Advanced",
)

FLAGS: tuple[Flag, ...] = (
    Flag("dataset_file", RUN, "", text, "JSONL file of prompts, one object with a \"prompt\" a line", "(required)", "FILE"),
    Flag("batch_size", RUN, None, integer(1), "Prompts per batch; the prompts of a batch run one after another", "10", "N"),
    Flag("run_name", RUN, "", text, "Name of the run, and of its folder under --output_dir", "(required)", "NAME"),
    Flag("distribution", RUN, "default", text, "Toolset distribution to draw each prompt's tools from", placeholder="NAME"),
    Flag("max_turns", RUN, 10, integer(1, 100_000), "Most model calls per prompt", placeholder="N"),
    Flag("num_workers", RUN, 4, integer(1, 100_000), "Batches in flight at once", placeholder="N"),
    Flag("resume", RUN, False, boolean, "Go on with an interrupted run: only what is not done yet is run", placeholder=""),
    Flag("retry", RUN, "failed", parse_retry, "With --resume, which ended prompts are run again: failed, partial, discarded, filtered, ids:3,10-19 (prompt indices), or none; the new row takes the old one's place", placeholder="WORDS"),
    Flag("accept_changes", RUN, False, boolean, "With --resume, go on although the dataset, the model, a prompt or a sampling setting is another than before", placeholder=""),
    Flag("start_over", RUN, False, boolean, "Begin anew; a run of this name that exists is moved aside, not deleted", placeholder=""),
    Flag("max_samples", RUN, None, count_or_all, "Only the first N valid rows of the dataset", "all", "N"),
    Flag("seed", RUN, 0, integer(0, 2**63 - 1), "Seed of each prompt's toolset draw", placeholder="N"),
    Flag("output_dir", RUN, "data", text, "Folder that holds the run folders", placeholder="DIR"),
    Flag("keep_no_reasoning", RUN, False, boolean, "Keep rows in which no assistant turn has reasoning; with --resume also those discarded before", placeholder=""),
    Flag("engine", RUN, "processes", text, "Where workers run: processes, or inline (all in this one)", placeholder="NAME"),
    Flag("sandbox", RUN, "auto", text, "Where tools run: bubblewrap, local, or auto (bubblewrap where it works, else local)", placeholder="NAME"),
    Flag("verbose", RUN, False, boolean, "Show each turn while it happens", placeholder=""),
    Flag("grace_s", RUN, 20.0, decimal(0, 1e7), "Seconds that prompts in flight get to finish after a first Ctrl-C or kill; a second one leaves at once", "20", "X"),
    Flag("list_distributions", RUN, False, boolean, "Show all toolset distributions, and end", placeholder=""),
    Flag("config", RUN, "", text, "TOML or YAML file, or a former run's run.json, with the same names; the command line wins", "", "FILE"),
    Flag("model", MODEL, "anthropic/claude-sonnet-4.6", text, "Model to use; `local` is a small demonstration model on this machine, `local:FILE.gguf` any GGUF file"),
    Flag("base_url", MODEL, "https://openrouter.ai/api/v1", text, "OpenAI-compatible endpoint", placeholder="URL"),
    Flag("api_key", MODEL, "", text, "Key for the endpoint; better left in the environment, where the process list does not show it", "(environment)", "KEY"),
    Flag("max_tokens", MODEL, None, integer(1), "Most tokens per model response", "model default", "N"),
    Flag("temperature", MODEL, None, decimal(0, 2), "Sampling temperature", "model default", "X"),
    Flag("top_p", MODEL, None, decimal(0, 1), "Nucleus sampling", "model default", "X"),
    Flag("request_timeout_s", MODEL, 600.0, decimal(0.001, 1e7), "Most seconds for one model call, its retries included; waiting for the endpoint to have room is apart", "600", "X"),
    Flag("prompt_timeout_s", MODEL, 3600.0, decimal(0.001, 1e7), "Most seconds of a prompt's own time, model calls and tools; waiting for the endpoint to have room is apart", "3600", "X"),
    Flag("in_flight_limit", MODEL, "adaptive", in_flight_limit, "Requests at once: adaptive falls below what the endpoint refuses and grows again, N adapts up to N, off sends whatever the workers have", placeholder="N"),
    Flag("stream", MODEL, False, boolean, "Ask for replies piece by piece, which keeps long ones alive through proxies; the rows are the same", placeholder=""),
    Flag("max_cost_usd", LIMITS, None, or_none(decimal(0, 1e9)), "Start no prompt that would bring the run's cost, all its starts together, above this; what is in flight finishes", "no limit", "X"),
    Flag("max_total_tokens", LIMITS, None, or_none(integer(0, 2**53)), "The same for its tokens, prompt and completion", "no limit", "N"),
    Flag("max_duration_s", LIMITS, None, or_none(decimal(0, 1e9)), "The same for its seconds", "no limit", "X"),
    Flag("max_failures", LIMITS, None, or_none(count_or_percentage), f"Start no more prompts once more than N of this start failed or, as 10%, more than that share of the last {FAILURE_WINDOW} (from the {FAILURE_WINDOW_MIN}th on)", "no limit", "N"),
    Flag("prompt_max_tokens", LIMITS, None, or_none(integer(1)), "End a prompt as partial before a model call that would bring its tokens above this", "no limit", "N"),
    Flag("dry_run", LIMITS, None, or_none(integer(1)), "Run only N prompts, drawn by --seed, and say what the whole run will cost and take; their rows are kept, and --resume runs the rest", "all prompts", "N"),
    Flag("price_per_mtok", LIMITS, None, or_none(price_pair), "US dollars per million prompt and completion tokens, for calls whose cost the endpoint does not report", "genai-prices, where installed", "IN,OUT"),
    Flag("providers_allowed", ROUTING, (), name_list, "Only these providers, e.g. \"anthropic,openai\"", "", "A,B"),
    Flag("providers_ignored", ROUTING, (), name_list, "Never these providers, e.g. \"together,deepinfra\"", "", "A,B"),
    Flag("providers_order", ROUTING, (), name_list, "Providers to try first, in this order", "", "A,B"),
    Flag("provider_sort", ROUTING, "", one_of(PROVIDER_SORTS), "Sort providers by price, throughput or latency", "", "WORD"),
    Flag("reasoning_effort", REASONING, "", one_of(REASONING_EFFORTS), f"Reasoning effort: {', '.join(REASONING_EFFORTS)}", "medium on OpenRouter", "WORD"),
    Flag("reasoning_disabled", REASONING, False, boolean, "Switch reasoning off", placeholder=""),
    Flag("system_prompt", ADVANCED, None, text, "System prompt, saved in the rows; empty for none", "a short one of ours"),
    Flag("ephemeral_system_prompt", ADVANCED, "", text, "System prompt used during the run but not saved in the rows", ""),
    Flag("prefill_messages_file", ADVANCED, "", text, "JSON array of messages sent after the system prompt on every request, never saved", "", "FILE"),
    Flag("log_prefix_chars", ADVANCED, 100, integer(0), "Characters shown of each text under --verbose", placeholder="N"),
)  # fmt: skip

_CONVERSATION_GROUPS = (MODEL, ROUTING, REASONING, ADVANCED)
AGENT_FLAGS: tuple[Flag, ...] = (
    Flag("prompt", CONVERSATION, "", text, "What to ask", "(required)"),
    Flag("enabled_toolsets", CONVERSATION, None, name_list, "Toolsets to offer", "all that work here", "A,B"),
    Flag("save_trajectories", CONVERSATION, False, boolean, "Append the conversation to trajectory_samples.jsonl, or to failed_trajectories.jsonl when it did not complete", placeholder=""),
    *(flag for flag in FLAGS if flag.name in ("max_turns", "sandbox")),
    *(flag for flag in FLAGS if flag.name != "in_flight_limit" and flag.group in _CONVERSATION_GROUPS and flag.name != "log_prefix_chars"),
    Flag("log_prefix_chars", ADVANCED, None, integer(0), "Characters shown of each text", "all", "N"),
)  # fmt: skip
"""The flags of `run_agent.py`, which runs one prompt."""

FLAG_BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}


def normalise_argv(argv: Sequence[str], flags: Mapping[str, Flag] = FLAG_BY_NAME) -> dict[str, str]:
    """Flags as typed -> name and string, in the order given; the last of a repeated flag wins.

    `--name=value`, `--name value` and, for booleans, `--name` alone are understood; hyphens in a name count as
    underscores. Values are not parsed here.

    Raises:
        ConfigError: an unknown flag, a stray word, or a flag without its value.
    """
    given: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            # What stands after `--api_key=` and a slip of the finger is a key, and not to be shown.
            shown = "a word after --api_key" if given and next(reversed(given)) == "api_key" else repr(word)
            raise ConfigError(f"{shown} is not a flag; write --name=value (see --help){_stray_hint(word, given)}")
        typed, equals, value = word[2:].partition("=")
        name = typed.replace("-", "_")
        if name not in flags:
            raise ConfigError(f"unknown flag --{typed}{_nearest_flag(name, flags)}; --help lists all")
        if not equals:
            value = _value_after(name, flags[name], rest)
        given[name] = value
    return given


def _value_after(name: str, flag: Flag, rest: list[str]) -> str:
    """The value of `--name VALUE`, taken from `rest`; "true" for a boolean that stands alone."""
    if flag.parse is boolean:
        is_word = bool(rest) and rest[0].lower() in TRUE_WORDS | FALSE_WORDS
        return rest.pop(0) if is_word else "true"
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name} needs a value; write --{name}={flag.placeholder}")
    return rest.pop(0)


def _nearest_flag(name: str, flags: Mapping[str, Flag]) -> str:
    near = difflib.get_close_matches(name, list(flags), n=1, cutoff=0.5)
    return f"; did you mean --{near[0]}?" if near else ""


def _stray_hint(word: str, given: dict[str, str]) -> str:
    if word.startswith("-") and len(word) > 1:
        return "; flags start with two hyphens"
    if given:
        last = next(reversed(given))
        return f"; if it belongs to --{last}, put the value in quotes"
    return ""


def help_text(usage: str, summary: str, flags: Sequence[Flag] = FLAGS) -> str:
    """The `--help` page: usage, then each group of flags with defaults."""
    lines = [f"Usage: {usage}", "", summary]
    for group in dict.fromkeys(flag.group for flag in flags):
        lines += ["", f"{group}:"]
        for flag in (flag for flag in flags if flag.group == group):
            spelling = f"--{flag.name}" + (f"={flag.placeholder}" if flag.placeholder else "")
            lines += _help_entry(spelling, flag.help + _shown_default(flag))
    return "\n".join(lines)


def _shown_default(flag: Flag) -> str:
    plain = isinstance(flag.default, int | str) and not isinstance(flag.default, bool)
    shown = flag.shown_default or (str(flag.default) if plain else "")
    if shown.startswith("("):
        return f" {shown}"
    return f" (default: {shown})" if shown else ""


def _help_entry(spelling: str, description: str, width: int = 100, indent: int = 32) -> list[str]:
    """One flag, its description wrapped to the right of it."""
    lines = [f"  {spelling}"]
    if len(lines[0]) < indent - 1:
        lines[0] = lines[0].ljust(indent)
    else:
        lines.append(" " * indent)
    for word in description.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(" " * indent)
        lines[-1] += word if lines[-1].endswith(" " * 2) or len(lines[-1]) == indent else f" {word}"
    return [line.rstrip() for line in lines]
