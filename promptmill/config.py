"""Options and environment -> RunConfig. The only reader of the environment.

Order of precedence, weakest first: defaults, the run's own `run.json` (on resume), `--config`, the command line.
"""

import codecs
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from promptmill.endpoints import NO_KEY, Endpoint, endpoint_for
from promptmill.errors import ConfigError
from promptmill.flags import FLAG_BY_NAME, FLAGS, boolean, did_you_mean
from promptmill.records import Message
from promptmill.retry import Retry, read_retry
from promptmill.secrets import secrets_in

DEFAULT_SYSTEM_PROMPT = (
    "You are a capable assistant that works in a fresh Linux sandbox of its own. "
    "Use the tools you are given to look, run and check instead of guessing, then answer the user."
)

DEFAULT_BATCH_SIZE = 10
ALIAS_ON_OPENROUTER = {"claude-sonnet-4.6": "anthropic/claude-sonnet-4.6"}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What is asked for. Both empty: nothing was said."""

    enabled: bool | None = None
    effort: str = ""

    @property
    def is_off(self) -> bool:
        return self.enabled is False


@dataclass(frozen=True, slots=True)
class Routing:
    """OpenRouter's choice among providers."""

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    sort: str = ""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Everything that shapes a request, the conversation apart."""

    model: str
    endpoint: Endpoint
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    request_timeout_s: float = 600.0
    """Seconds for one model call, all its attempts together; waiting for the endpoint to have room is apart."""
    reasoning: Reasoning = Reasoning()
    routing: Routing = Routing()
    price_per_mtok: tuple[float, float] | None = None
    """US dollars for a million prompt tokens, and for as many completion tokens."""
    stream: bool = False
    """Whether replies are asked for piece by piece; what is read of them is the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a run early; None for no limit. See `budget`."""

    max_cost_usd: float | None = None
    max_total_tokens: int | None = None
    max_duration_s: float | None = None
    max_failures: int | str | None = None
    """A number of prompts, or a percentage as it was typed (`10%`)."""

    @property
    def are_set(self) -> bool:
        """Whether there is any."""
        return self != Limits()


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent says before the prompt, and how long it goes on."""

    max_turns: int = 10
    prompt_max_tokens: int | None = None
    """Most tokens of a prompt's model calls together, prompt and completion."""
    prompt_timeout_s: float = 3600.0
    """Seconds of a prompt's own time, model calls and tools; waiting for the endpoint to have room is apart."""
    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    ephemeral_system_prompt: str = ""
    prefill_messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run, fully decided."""

    dataset_file: Path
    run_name: str
    output_dir: Path
    batch_size: int
    batch_size_given: bool
    """Whether somebody chose it; the start says so when it is the default."""
    num_workers: int
    max_samples: int | None
    distribution: str
    seed: int
    engine: str
    sandbox: str
    in_flight_limit: str | int
    """Requests at once at the endpoint: `adaptive`, `off`, or adaptive up to a number."""
    keep_no_reasoning: bool
    verbose: bool
    grace_s: float
    """Seconds that prompts in flight get to finish, once the command was told to stop."""
    log_prefix_chars: int
    model: ModelSettings
    agent: AgentSettings
    limits: Limits = Limits()
    retry: Retry = Retry()
    """Which of the samples that have ended are run again."""
    accept_changes: bool = False
    """Whether a resume may go on with another dataset, model or prompt than the run was started with."""
    start_over: bool = False
    """Whether a run of this name that exists is moved aside."""
    dry_run: int | None = None
    """How many drawn prompts to run, for an estimate; None for all that are owed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options as decided, by flag name, without the key: what `run.json` keeps."""
    secrets: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """What is masked in all that is written or shown."""

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.run_name


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything a worker needs to know; goes to other processes."""

    config: RunConfig
    sandbox: str
    """The backend that was chosen; never `auto`."""
    available_toolsets: tuple[str, ...]
    """Toolsets of the distribution whose tools can run here."""
    conversations: int
    """How many conversations this worker may have in flight."""

    def with_model(self, model: ModelSettings) -> "WorkerSettings":
        """The same with another model or endpoint."""
        return replace(self, config=replace(self.config, model=model))


def environment() -> Mapping[str, str]:
    """The process's environment, for whoever needs some of it."""
    return os.environ


@contextmanager
def environment_with(**variables: str) -> Iterator[None]:
    """Set some variables of the process's environment while another process is started."""
    former = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(former)


def options_from(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Parse and stack option layers, weakest first, over the defaults.

    Raises:
        ConfigError: an unknown name or a value that its flag refuses.
    """
    options = {flag.name: flag.default for flag in FLAGS}
    for layer in layers:
        for name, value in layer.items():
            if name not in FLAG_BY_NAME:
                near = did_you_mean(name, list(FLAG_BY_NAME))
                raise ConfigError(f"unknown option {name!r}{near}; known: {', '.join(sorted(FLAG_BY_NAME))}")
            if value is not None:
                options[name] = FLAG_BY_NAME[name].parse(name, value)
    return options


def read_config_file(path: str) -> dict[str, Any]:
    """Options from a TOML, YAML or JSON file, or from the `run.json` of a former run.

    Raises:
        ConfigError: the file cannot be read, is of another kind, or holds no mapping.
    """
    file = Path(path)
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config={path}: cannot read it ({exc})") from exc
    try:
        data = _decode_config(file.suffix.lower(), content)
    except ValueError as exc:
        raise ConfigError(f"--config={path}: {exc}") from exc
    if isinstance(data, dict) and isinstance(data.get("options"), dict):
        data = data["options"]
    if not isinstance(data, dict):
        raise ConfigError(f'--config={path}: it must hold names and values, e.g. model = "openai/gpt-4o"')
    options = {str(name).replace("-", "_"): value for name, value in data.items()}
    if misplaced := _ONLY_TYPED & options.keys():
        raise ConfigError(f"--config={path}: {sorted(misplaced)[0]!r} belongs on the command line")
    return options


def _decode_config(suffix: str, content: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(content)
    if suffix == ".json":
        return json.loads(content)
    if suffix in (".yaml", ".yml"):
        try:
            import yaml  # an optional package: extra `yaml`
        except ImportError as exc:
            raise ConfigError("a YAML file needs the extra: pip install 'promptmill[yaml]'; or use TOML") from exc
        try:
            return yaml.safe_load(content)
        except yaml.YAMLError as exc:
            raise ValueError(str(exc)) from exc
    raise ValueError(f"unknown kind {suffix!r}; known: .toml, .yaml, .yml, .json")


def build_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> RunConfig:
    """Decide a run from parsed options.

    Raises:
        ConfigError: something required is missing, options contradict each other, or there is no key.
    """
    for name in ("dataset_file", "run_name"):
        if not options[name]:
            raise ConfigError(f"--{name} is required; see --help")
    check_run_name(options["run_name"])
    if not options["output_dir"]:
        raise ConfigError("--output_dir is empty; leave it out for `data`")
    model = model_settings(options, environ)
    return RunConfig(
        dataset_file=Path(options["dataset_file"]).expanduser(),
        run_name=options["run_name"],
        output_dir=Path(options["output_dir"]).expanduser(),
        batch_size=options["batch_size"] or DEFAULT_BATCH_SIZE,
        batch_size_given=options["batch_size"] is not None,
        model=model,
        agent=agent_settings(options),
        retry=read_retry(options["retry"]),
        dry_run=options["dry_run"],
        limits=Limits(**{limit.name: options[limit.name] for limit in fields(Limits)}),
        secrets=secrets_in(environ, model.endpoint.api_key),
        options={name: value for name, value in options.items() if name not in _NOT_KEPT},
        **{name: options[name] for name in _SAME_NAME},
    )


_SAME_NAME = (
    "num_workers", "max_samples", "distribution", "seed", "engine", "sandbox", "in_flight_limit",
    "keep_no_reasoning", "verbose", "grace_s", "log_prefix_chars", "accept_changes", "start_over",
)  # fmt: skip
_ONLY_TYPED = frozenset({"list_distributions", "config"})
_NOT_KEPT = frozenset(
    {"api_key", "resume", "verbose", "grace_s", "list_distributions", "config", "dry_run"}
    | {"retry", "accept_changes", "start_over"}
)
"""Secrets, and what belongs to one command rather than to the run."""


def check_run_name(name: str) -> None:
    """Refuse a name that is no single visible folder name. Raises ConfigError."""
    if not name.strip() or name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f]", name) or len(name.encode()) > 200:
        raise ConfigError(
            f"--run_name={name!r} cannot name a folder: no slashes, no leading dot, no control characters, "
            "at most 200 bytes; e.g. --run_name=my_run"
        )


def model_settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> ModelSettings:
    """The model half of the options. Raises ConfigError."""
    model = options["model"]
    if not model:
        raise ConfigError("--model is empty; e.g. --model=anthropic/claude-sonnet-4.6")
    if is_local_model(model):
        if options["base_url"] != FLAG_BY_NAME["base_url"].default:
            raise ConfigError(f"--base_url contradicts --model={model}, which is served on this machine; give one")
        endpoint = Endpoint("", NO_KEY)
    else:
        endpoint = endpoint_for(options["base_url"], options["api_key"], environ)
        if endpoint.is_at("openrouter.ai"):
            model = ALIAS_ON_OPENROUTER.get(model, model)
    return ModelSettings(
        model=model,
        endpoint=endpoint,
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_p=options["top_p"],
        request_timeout_s=options["request_timeout_s"],
        reasoning=reasoning_from(options["reasoning_effort"], disabled=options["reasoning_disabled"]),
        routing=_routing(options),
        price_per_mtok=options["price_per_mtok"],
        stream=options["stream"],
    )


def is_local_model(model: str) -> bool:
    """Whether `--model` asks for the embedded server."""
    return model == "local" or model.startswith("local:")


def reasoning_from(effort: str, *, disabled: bool) -> Reasoning:
    """The two reasoning flags as one record. Raises ConfigError when they contradict each other."""
    if disabled and effort not in ("", "none"):
        raise ConfigError(
            f"--reasoning_disabled contradicts --reasoning_effort={effort}; give one of them "
            "(a resumed run keeps the options it was started with; --reasoning_disabled=false undoes that one)"
        )
    if disabled or effort == "none":
        return Reasoning(enabled=False)
    return Reasoning(enabled=True, effort=effort) if effort else Reasoning()


def reasoning_options(reasoning_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """`{"enabled": bool, "effort": str}` as the two reasoning flags; an effort alone switches reasoning on."""
    if not reasoning_config:
        return {}
    unknown = sorted(set(reasoning_config) - {"enabled", "effort"})
    if unknown:
        raise ConfigError(f"reasoning_config: unknown key {unknown[0]!r}; known: enabled, effort")
    enabled = reasoning_config.get("enabled")
    if enabled is not None and not boolean("reasoning_config", enabled):
        return {"reasoning_disabled": True}
    return {"reasoning_effort": str(reasoning_config.get("effort") or "medium")}


def _routing(options: Mapping[str, Any]) -> Routing:
    routing = Routing(
        only=options["providers_allowed"],
        ignore=options["providers_ignored"],
        order=options["providers_order"],
        sort=options["provider_sort"],
    )
    contradictions = set(routing.ignore) & (set(routing.only) | set(routing.order))
    if contradictions:
        raise ConfigError(f"provider {sorted(contradictions)[0]!r} is both asked for and in --providers_ignored")
    return routing


def agent_settings(options: Mapping[str, Any]) -> AgentSettings:
    """The agent half of the options. Raises ConfigError when the prefill file is unusable."""
    system_prompt = options["system_prompt"]
    return AgentSettings(
        max_turns=options["max_turns"],
        prompt_max_tokens=options["prompt_max_tokens"],
        prompt_timeout_s=options["prompt_timeout_s"],
        system_prompt=DEFAULT_SYSTEM_PROMPT if system_prompt is None else system_prompt,
        ephemeral_system_prompt=options["ephemeral_system_prompt"],
        prefill_messages=_read_prefill(options["prefill_messages_file"]),
    )


def _read_prefill(path: str) -> tuple[Message, ...]:
    if not path:
        return ()
    try:
        data = orjson.loads(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--prefill_messages_file={path}: cannot read it as JSON ({exc})") from exc
    if not isinstance(data, list):
        raise ConfigError(f"--prefill_messages_file={path}: it must be a JSON array of messages")
    return prefill_from(data, where=f"--prefill_messages_file={path}")


def prefill_from(messages: Iterable[object], where: str) -> tuple[Message, ...]:
    """Check prefill messages: objects with a known `role` and text `content`. Raises ConfigError."""
    checked = []
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ConfigError(
                f"{where}: message {number} must be "
                '{"role": "user", "content": "..."}, its role one of system, user, assistant'
            )
        checked.append(Message(role=role, content=content))
    return tuple(checked)
