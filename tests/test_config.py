"""Options and environment -> RunConfig: precedence, files, keys, names, contradictions."""

import pytest

from promptmill.config import (
    DEFAULT_SYSTEM_PROMPT,
    Reasoning,
    build_config,
    options_from,
    read_config_file,
)
from promptmill.endpoints import KEY_VARIABLE_BY_HOST, NO_KEY, endpoint_for
from promptmill.errors import ConfigError
from tests.rows import options

KEYS = {variable: f"secret-of-{host}" for host, variable in KEY_VARIABLE_BY_HOST.items()}


def config(environ=KEYS, **given):
    return build_config(options(**given), environ)


# ── precedence and files ──────────────────────────────────────────────────────────────────────────────────


def test_a_later_layer_wins_and_none_says_nothing():
    stacked = options_from({"seed": 1, "model": "a"}, {"seed": "2", "model": None}, {"batch_size": "5"})
    assert (stacked["seed"], stacked["model"], stacked["batch_size"], stacked["num_workers"]) == (2, "a", 5, 4)


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="unknown option 'batchsize'"):
        options_from({"batchsize": 3})


CONFIG_FILES = {
    "a.toml": 'model = "m"\nbatch-size = 3\nproviders_allowed = ["a", "b"]\nresume = true\n',
    "a.yaml": "model: m\nbatch_size: 3\nproviders_allowed: a, b\nresume: yes\nseed: null\n",
    "a.yml": "model: m\nbatch_size: 3\nproviders_allowed: [a, b]\nresume: true\n",
    "a.json": '{"model": "m", "batch_size": "3", "providers_allowed": "a,b", "resume": "yes"}',
    "run.json": '{"options": {"model": "m", "batch_size": 3, "providers_allowed": ["a", "b"], "resume": true}, "x": 1}',
    "bom.JSON": '\ufeff{"model": "m", "batch_size": 3, "providers_allowed": "a,b", "resume": 1}',
}


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_configuration_file_holds_the_same_names(tmp_path, name):
    path = tmp_path / name
    path.write_text(CONFIG_FILES[name], encoding="utf-8")
    read = options_from(read_config_file(str(path)))
    given = {"model": "m", "batch_size": 3, "providers_allowed": ("a", "b"), "resume": True}
    assert read == options_from() | given


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.toml", "model = ", "a.toml: "),
        ("a.yaml", "model: [", "a.yaml: "),
        ("a.json", "{", "a.json: "),
        ("a.json", "[1]", "must hold names and values"),
        ("a.yaml", "", "must hold names and values"),
        ("a.ini", "model=m", "unknown kind '.ini'; known: .toml, .yaml, .yml, .json"),
        ("a.toml", b"model = '\xff'", "cannot read it"),
    ],
)
def test_an_unusable_configuration_file_is_named(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refusal:
        read_config_file(str(path))
    assert complaint in str(refusal.value)


def test_a_missing_configuration_file_is_named():
    with pytest.raises(ConfigError, match="--config=nowhere.toml: cannot read it"):
        read_config_file("nowhere.toml")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"model": 4}, "--model must be text, not 4; put it in quotes"),
        ({"batch_size": 3.0}, "--batch_size is 3.0; give a whole number"),
        ({"batch_size": True}, "--batch_size is True"),
        ({"temperature": True}, "--temperature is True"),
        ({"providers_order": 3}, "--providers_order is 3"),
        ({"providers_order": ["a", 3]}, "--providers_order is "),
        ({"resume": "perhaps"}, "--resume is 'perhaps'"),
    ],
)
def test_a_value_of_another_type_in_a_configuration_file_is_refused(given, complaint):
    with pytest.raises(ConfigError) as refusal:
        options_from(given)
    assert complaint in str(refusal.value)


def test_what_run_json_keeps_makes_the_same_run_again(tmp_path):
    given = {"api_key": "k", "providers_order": "a,b", "temperature": "0.5", "system_prompt": "", "seed": 3}
    for first in (config(), config(**given)):
        again = build_config(options_from(first.options, {"api_key": first.model.endpoint.api_key}), {})
        assert again == first


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("host", "variable"), KEY_VARIABLE_BY_HOST.items())
def test_the_key_is_the_one_of_the_endpoints_host(host, variable):
    assert endpoint_for(f"https://{host}/v1", "", KEYS).api_key == KEYS[variable]
    assert endpoint_for(f"https://{host.upper()}:443/v1/", "", KEYS).api_key == KEYS[variable]
    with pytest.raises(ConfigError, match=f"no key for {host}: set {variable} in the environment"):
        endpoint_for(f"https://{host}/v1", "", {variable: " "})


FOREIGN = [
    "api.openai.com.evil.org", "openrouter.ai.evil.org", "evilopenrouter.ai", "evil-openrouter.ai", "api-openai.com",
    "openai.com", "openai", "openrouter", "api.openai.com.", "xn--openroute-9na.ai", "8.8.8.8", "api.openai.co",
    "gemini",
]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("scheme", ["https", "http"])
def test_no_key_goes_to_a_foreign_host(host, scheme):
    try:
        key = endpoint_for(f"{scheme}://{host}/v1", "", KEYS).api_key
    except ConfigError as refusal:
        key = str(refusal)
    assert "secret-of" not in key


@pytest.mark.parametrize("host", ["cohere", "github", "tavily"])
def test_a_container_called_like_a_vendor_does_not_get_the_vendors_key(host):
    assert endpoint_for(f"http://{host}:8000/v1", "", {f"{host.upper()}_API_KEY": "secret"}).api_key == NO_KEY


@pytest.mark.parametrize(
    ("host", "variable"),
    [
        ("llm.example.org", "HOST_LLM_EXAMPLE_ORG_API_KEY"),
        ("llm-example.org", "HOST_LLM__EXAMPLE_ORG_API_KEY"),
        ("8.8.8.8", "HOST_8_8_8_8_API_KEY"),
    ],
)
def test_another_host_has_a_variable_of_its_own(host, variable):
    assert endpoint_for(f"https://{host}/v1", "", {variable: "k"}).api_key == "k"
    with pytest.raises(ConfigError, match=f"set {variable} in the environment"):
        endpoint_for(f"https://{host}/v1", "", {})


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "10.1.2.3", "172.16.0.1", "192.168.0.9", "vllm", "gpu.local",
     "[fe80::1]", "vllm.cluster.internal", "0.0.0.0"],
)  # fmt: skip
def test_a_loopback_or_private_host_needs_no_key(host):
    assert endpoint_for(f"http://{host}:8000/v1", "", KEYS).api_key == NO_KEY


def test_a_private_host_gets_the_key_of_its_own_variable():
    assert endpoint_for("http://localhost:8000/v1", "", {"HOST_LOCALHOST_API_KEY": "k"}).api_key == "k"


def test_a_public_host_without_tls_gets_no_key_from_the_environment():
    with pytest.raises(ConfigError, match="OPENROUTER_API_KEY is not sent to openrouter.ai unencrypted: write"):
        endpoint_for("http://openrouter.ai/api/v1", "", KEYS)
    with pytest.raises(ConfigError, match="and an https:// address, or give --api_key"):
        endpoint_for("http://openrouter.ai/api/v1", "", {})


@pytest.mark.parametrize("url", ["http://openrouter.ai/api/v1", "https://api.openai.com.evil.org/v1", "http://a/v1"])
def test_a_key_given_by_flag_goes_where_it_is_sent(url):
    assert endpoint_for(url, " given\n", KEYS).api_key == "given"


@pytest.mark.parametrize("key", ["cl\u00e9", "\u201csk-1\u201d", "sk 1", "sk\n1", " "])
def test_what_cannot_be_a_key_is_refused_without_showing_it(key):
    with pytest.raises(ConfigError, match="--api_key is no key") as refusal:
        endpoint_for("http://localhost/v1", key, {})
    assert key == " " or key not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://user:password@openrouter.ai/api/v1", "must not contain a user or password"),
        ("https://openrouter.ai/api/v1/chat/completions/", "leave out /chat/completions"),
        ("https://api.openai.com@evil.org/v1", "must not contain a user or password"),
        ("https://evil.org\\@api.openai.com/v1", "must not contain a user or password"),
        ("https://gateway.org/v1?key=secret", "without \\? or #"),
        ("https://evil.org#@api.openai.com/v1", "without \\? or #"),
        ("openrouter.ai/api/v1", "is no address"),
        ("ftp://localhost/v1", "is no address"),
        ("https:///v1", "is no address"),
        ("", "is no address"),
        ("http://localhost:0/v1", "is no address"),
        ("http://localhost:99999/v1", "--base_url=http://localhost:99999/v1"),
        ("http://[::1/v1", "--base_url="),
    ],
)
def test_what_is_no_address_is_refused(url, complaint):
    with pytest.raises(ConfigError, match=complaint) as refusal:
        endpoint_for(url, "", KEYS)
    assert "password@" not in str(refusal.value)
    assert "key=secret" not in str(refusal.value)


def test_secrets_are_neither_in_the_options_nor_in_what_is_printed():
    decided = config(api_key="very-secret")
    assert decided.model.endpoint.api_key == "very-secret"
    assert "very-secret" not in repr(decided)
    assert "very-secret" not in repr(decided.options)
    assert "secret-of" not in repr(config())


# ── the rest of a run ─────────────────────────────────────────────────────────────────────────────────────


def test_a_run_with_nothing_but_the_required_flags_is_the_documented_default():
    decided = config()
    assert (decided.batch_size, decided.num_workers, decided.agent.max_turns) == (10, 4, 10)
    assert (decided.distribution, decided.engine, decided.log_prefix_chars) == ("default", "processes", 100)
    assert str(decided.run_dir) == "data/my_run"
    assert decided.model.model == "anthropic/claude-sonnet-4.6"
    assert decided.model.endpoint.base_url == "https://openrouter.ai/api/v1"
    assert decided.model.reasoning == Reasoning()
    assert decided.agent.system_prompt == DEFAULT_SYSTEM_PROMPT


@pytest.mark.parametrize(
    ("base_url", "model"),
    [
        ("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4.6"),
        ("https://api.anthropic.com/v1", "claude-sonnet-4.6"),
        ("http://localhost:8000/v1", "claude-sonnet-4.6"),
    ],
)
def test_the_short_name_of_the_default_model_is_known_on_openrouter_alone(base_url, model):
    assert config(model="claude-sonnet-4.6", base_url=base_url).model.model == model


@pytest.mark.parametrize("model", ["local", "local:model.gguf"])
def test_the_embedded_model_needs_neither_key_nor_address(model):
    assert config(environ={}, model=model).model.model == model


@pytest.mark.parametrize("name", ["dataset_file", "run_name", "model"])
def test_what_is_required_is_asked_for(name):
    with pytest.raises(ConfigError, match=f"--{name} is "):
        config(**{name: ""})


@pytest.mark.parametrize("name", ["my_run", "2024_01", "1e5", "a b", "日本", "a.b", "x" * 200])
def test_a_run_name_is_a_folder_under_the_output_folder(tmp_path, name):
    decided = config(run_name=name, output_dir=str(tmp_path))
    decided.run_dir.mkdir()
    assert [child.name for child in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name", [".", "..", "../x", "/tmp/x", "a/b", "a/../../b", "a\\b", ".hidden", "a\nb", "a\0b", "x" * 201, "日" * 67]
)
def test_a_run_name_cannot_leave_the_output_folder(name):
    with pytest.raises(ConfigError, match="cannot name a folder"):
        config(run_name=name)


@pytest.mark.parametrize(
    ("given", "reasoning"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(enabled=True, effort="high")),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False)),
        ({"reasoning_disabled": True}, Reasoning(enabled=False)),
        ({"reasoning_disabled": True, "reasoning_effort": "none"}, Reasoning(enabled=False)),
        ({"reasoning_disabled": "no", "reasoning_effort": "low"}, Reasoning(enabled=True, effort="low")),
    ],
)
def test_the_two_reasoning_flags_are_one_wish(given, reasoning):
    assert config(**given).model.reasoning == reasoning


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"reasoning_disabled": True, "reasoning_effort": "high"}, "contradicts --reasoning_effort=high"),
        ({"providers_allowed": "a,b", "providers_ignored": "b"}, "provider 'b' is both asked for and in"),
        ({"providers_order": "b", "providers_ignored": "b"}, "provider 'b' is both asked for and in"),
    ],
)
def test_a_contradiction_is_refused(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(**given)


def test_an_empty_system_prompt_is_none_at_all():
    assert config(system_prompt="").agent.system_prompt == ""


def test_prefill_messages_are_read(tmp_path):
    path = tmp_path / "prefill.json"
    path.write_text('\ufeff[{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]', encoding="utf-8")
    messages = config(prefill_messages_file=str(path)).agent.prefill_messages
    assert [(message.role, message.content) for message in messages] == [("user", "hi"), ("assistant", "")]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{}", "must be a JSON array"),
        ("[", "cannot read it as JSON"),
        ('[{"role": "user", "content": "\\ud800"}]', "cannot read it as JSON"),
        ('["hi"]', "message 1 must be"),
        ('[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]', "message 2 must be"),
        ('[{"role": "user", "content": ["a"]}]', "message 1 must be"),
        ('[{"content": "a"}]', "message 1 must be"),
    ],
)
def test_an_unusable_prefill_file_is_refused(tmp_path, content, complaint):
    path = tmp_path / "prefill.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        config(prefill_messages_file=str(path))


def test_a_missing_prefill_file_is_named():
    with pytest.raises(ConfigError, match="--prefill_messages_file=nowhere.json: cannot read it"):
        config(prefill_messages_file="nowhere.json")
