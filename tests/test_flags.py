"""Flags as typed -> options: nothing is re-typed, nothing unknown passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promptmill.config import options_from
from promptmill.errors import ConfigError
from promptmill.flags import FLAG_BY_NAME, FLAGS, help_text, normalise_argv

LOOKS_LIKE_SOMETHING_ELSE = [
    "1e5", "2024_01", "007", "0x10", "1_000", "a,b", "x#y", "null", "None", "True", "{a:1}", "[1]", "(1,)", "-5",
    "--x", "a=b", " spaced ", "", "'quoted'", "1.0", "日本", "line\nbreak", "%s", "~", "$HOME", "\\",
]  # fmt: skip
TEXT_FLAGS = [name for name, flag in FLAG_BY_NAME.items() if flag.parse is FLAG_BY_NAME["model"].parse]


def parsed(*argv: str, name: str):
    return options_from(normalise_argv(argv))[name]


@pytest.mark.parametrize("value", LOOKS_LIKE_SOMETHING_ELSE)
@pytest.mark.parametrize("name", TEXT_FLAGS)
def test_a_text_flag_is_the_text_that_was_typed(name, value):
    assert parsed(f"--{name}={value}", name=name) == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_flag_is_any_text_that_was_typed(value):
    assert parsed(f"--model={value}", name="model") == value


@pytest.mark.parametrize("value", [value for value in LOOKS_LIKE_SOMETHING_ELSE if not value.startswith("--")])
def test_a_value_may_follow_as_a_word_of_its_own(value):
    assert parsed("--run_name", value, "--resume", name="run_name") == value


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "yes", "YES", "1", "on"])
def test_a_boolean_is_true_for(word):
    assert parsed(f"--resume={word}", name="resume") is True
    assert parsed("--resume", word, name="resume") is True


@pytest.mark.parametrize("word", ["false", "False", "FALSE", "no", "No", "0", "off"])
def test_a_boolean_is_false_for(word):
    assert parsed(f"--resume={word}", name="resume") is False
    assert parsed("--resume", word, name="resume") is False


def test_a_boolean_alone_is_true():
    assert parsed("--resume", "--model=x", name="resume") is True
    assert parsed("--model=x", "--resume", name="resume") is True


@pytest.mark.parametrize("word", ["maybe", "2", "", "None", "truee", "-1"])
def test_a_boolean_of_another_word_is_refused(word):
    with pytest.raises(ConfigError, match="--resume"):
        parsed(f"--resume={word}", name="resume")


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("anthropic", ("anthropic",)),
        ("anthropic,openai", ("anthropic", "openai")),
        (" anthropic , openai ,", ("anthropic", "openai")),
        ("", ()),
        (",", ()),
        ("1,2", ("1", "2")),
    ],
)
def test_a_list_is_split_at_commas(typed, names):
    assert parsed(f"--providers_allowed={typed}", name="providers_allowed") == names


@pytest.mark.parametrize("word", ["low", "LOW", " low "])
def test_a_word_of_a_closed_set_is_taken_in_any_case(word):
    assert parsed(f"--reasoning_effort={word}", name="reasoning_effort") == "low"


def test_another_word_than_the_closed_set_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="known: price, throughput, latency; did you mean 'latency'"):
        parsed("--provider_sort=latncy", name="provider_sort")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--batchsize=3"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--no_such_thing_at_all=3"], "unknown flag --no_such_thing_at_all;"),
        (["--max-turn", "3"], "unknown flag --max-turn; did you mean --max_turns?"),
        (["prompts.jsonl"], "'prompts.jsonl' is not a flag"),
        (["--run_name=my", "run"], "if it belongs to --run_name, put the value in quotes"),
        (["--resume", "maybe"], "'maybe' is not a flag"),
        (["-n=3"], "flags start with two hyphens"),
        (["--"], "'--' is not a flag"),
        (["--=3"], "unknown flag"),
        ([""], "'' is not a flag"),
        (["--model"], "--model needs a value; write --model=TEXT"),
        (["--model", "--resume"], "--model needs a value"),
        (["--batch_size"], "--batch_size needs a value; write --batch_size=N"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_hint(argv, complaint):
    with pytest.raises(ConfigError) as refusal:
        normalise_argv(argv)
    assert complaint in str(refusal.value)


def test_hyphens_in_a_name_count_as_underscores():
    assert normalise_argv(["--run-name=my-run", "--batch-size", "3"]) == {"run_name": "my-run", "batch_size": "3"}


def test_the_last_of_a_repeated_flag_wins():
    assert normalise_argv(["--seed=1", "--seed=2"]) == {"seed": "2"}


@pytest.mark.parametrize("typed", ["1", "007", "+3", " 4 ", "2147483647"])
def test_a_whole_number_is_taken(typed):
    assert parsed(f"--batch_size={typed}", name="batch_size") == int(typed)


@pytest.mark.parametrize(
    "typed", ["0", "-1", "2147483648", "1e3", "1_000", "10.0", "0x10", "ten", "", "٣", "²", "nan", "1,000", "9" * 5000]
)
def test_another_number_is_refused(typed):
    with pytest.raises(ConfigError, match="--batch_size is "):
        parsed(f"--batch_size={typed}", name="batch_size")


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        ("batch_size", 1, 0),
        ("num_workers", 1, 0),
        ("max_turns", 1, 0),
        ("max_samples", 1, 0),
        ("max_tokens", 1, 0),
        ("seed", 0, -1),
        ("log_prefix_chars", 0, -1),
    ],
)
def test_every_number_has_a_least_value(name, least, below):
    assert parsed(f"--{name}={least}", name=name) == least
    with pytest.raises(ConfigError, match=f"--{name} is {below}; it must be between"):
        parsed(f"--{name}", str(below), name=name)


@pytest.mark.parametrize(("name", "most"), [("temperature", 2), ("top_p", 1)])
def test_a_decimal_is_range_checked(name, most):
    assert parsed(f"--{name}=0.5", name=name) == 0.5
    assert parsed(f"--{name}={most}", name=name) == most
    assert parsed(f"--{name}=1e-1", name=name) == 0.1
    for typed in ("-0.1", f"{most}.01", "nan", "inf", "warm", "", "0,5", "0_1"):
        with pytest.raises(ConfigError, match=f"--{name} is '{typed}'"):
            parsed(f"--{name}={typed}", name=name)


@pytest.mark.parametrize("name", ["model", "run_name", "api_key", "providers_order"])
def test_a_value_that_is_not_valid_utf8_is_refused(name):
    as_python_decodes_argv = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match=f"--{name} is not valid UTF-8"):
        parsed(f"--{name}={as_python_decodes_argv}", name=name)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_help_shows_every_flag_and_what_it_is_for(flag):
    page = help_text("python batch_runner.py", "Summary.")
    spelling = f"  --{flag.name}" + (f"={flag.placeholder}" if flag.placeholder else "")
    assert any(line.split("  ")[1] == spelling.strip() for line in page.splitlines() if line.startswith("  --"))
    assert " ".join(flag.help.split()) in " ".join(page.split())


def test_help_lines_fit_a_terminal():
    assert max(map(len, help_text("python batch_runner.py", "Summary.").splitlines())) <= 100


def test_every_default_passes_its_own_check():
    defaults = {flag.name: flag.default for flag in FLAGS if flag.default is not None}
    assert options_from(defaults) == options_from()
