"""No key of the runner's in anything it writes or shows, whoever echoes it and however it is written down."""

import base64
import json
import logging
import string
from pathlib import Path
from urllib.parse import quote, quote_plus

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from promptmill import client
from promptmill.errors import EndpointError
from promptmill.failures import RetryPolicy
from promptmill.logs import masked_records
from promptmill.secrets import MASKED, Mask, is_secret, secrets_in, secrets_typed
from tests.fakes.model_server import Answer, RecordedRequest, call, fail, one_turn, raw, say
from tests.test_command import Ended, as_flags, command, run_inline, run_options

KEY = "sk-test-9f3Kq7+Zr/2Wm8Xc4Vb6Nd1Lp5Jh0Gt_Ya"
"""Like no real key, with characters that URLs and JSON may escape."""
OTHER = "ghp_u8T2k5R7w1E4y9Q3z6X0v8B2n5M7a1S4d9F"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# ── what is a secret ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "word", ["", "none", "EMPTY", "not-needed", "none-needed", "disabled", "secret", "12345678", "true"]
)
def test_an_ordinary_word_is_no_secret(word):
    assert not is_secret(word)


@pytest.mark.parametrize("value", [KEY, OTHER, "hunter2hunter", "sk-abcde", "correct horse battery staple", "a" * 16])
def test_what_could_not_stand_in_a_text_by_chance_is_a_secret(value):
    assert is_secret(value)


def test_the_environments_secrets_are_found_by_name(tmp_path):
    key_file = tmp_path / "key-file-0001"
    key_file.touch()
    environ = {
        "MY_API_KEY": "api-key-00001", "HF_TOKEN": "token-0000002", "aws_secret_access_key": "secret-000003",
        "DB_PASSWORD": "password-0004", "APP_KEYS": "of-a-list-0005,of-a-list-0006", "APIKEY": "apikey-000007",
        "HTTP_PROXY": "http://me:p%40ss-word-08@proxy:3128", "PATH": "/usr/bin:/bin-00009", "LANG": "en_US.UTF-8000010",
        "SSH_KEY": str(key_file), "APP_TOKEN": "disabled", "TOKENIZERS_PARALLELISM": "false-000011",
    }  # fmt: skip
    assert secrets_in(environ, "given-000012") == tuple(
        sorted(
            ["api-key-00001", "token-0000002", "secret-000003", "password-0004", "of-a-list-0005,of-a-list-0006",
             "of-a-list-0005", "of-a-list-0006", "apikey-000007", "p%40ss-word-08", "p@ss-word-08", "given-000012"]
        )
    )  # fmt: skip


# ── the mask ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "written",
    [
        KEY, json.dumps(KEY), json.dumps(KEY).replace("/", "\\/"), json.dumps(json.dumps(KEY)),
        quote(KEY), quote(KEY, safe=""), quote_plus(KEY),
        quote(KEY, safe="").replace("%2F", "%2f").replace("%2B", "%2b"),
        KEY.encode().hex(), KEY.encode().hex().upper(),
        *(b64(before + KEY + after) for before in ("", "a", "ab") for after in ("", "c", "cd")),
        base64.urlsafe_b64encode(f"user:{KEY}".encode()).decode(),
    ],
)  # fmt: skip
def test_every_form_is_masked(written):
    masked = Mask([KEY]).text(f"before {written} after")
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    # Of base64, what neighbours have a part in stays.
    assert len(masked) <= len("before *** after") + 12


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n", "\\r\\n"])
@pytest.mark.parametrize("width", range(34, 78))
def test_a_form_that_is_broken_into_lines_is_masked(newline, width):
    written = b64(f"Authorization: Bearer {KEY}\n")
    broken = newline.join(written[place : place + width] for place in range(0, len(written), width))
    masked = Mask([KEY]).text(broken)
    before, _, after = masked.partition(MASKED)
    assert len(before.replace(newline, "")) <= 32
    assert len(after.replace(newline, "")) <= 4


@pytest.mark.parametrize("cut", [KEY[:25], KEY[20:], KEY[-14:]])
def test_what_is_left_of_a_key_that_was_cut_off_is_masked(cut):
    assert Mask([KEY]).text(f"{cut}… and more") == f"{MASKED}… and more"


def test_two_places_that_touch_become_one():
    assert Mask([KEY, OTHER]).text(KEY + OTHER + KEY) == MASKED


def test_a_text_without_a_secret_is_the_same_object():
    text = "the beginning sk-test- of a key, and ghp_ of another"
    assert Mask([KEY, OTHER]).text(text) is text
    assert not Mask([KEY, OTHER]).suspects(orjson.dumps(text))


AWKWARD = st.text(alphabet=string.ascii_letters + string.digits + 'nrtu"\\/+ é☃%', min_size=8, max_size=60)


@given(secret=AWKWARD.filter(is_secret), before=st.text(alphabet='ab\\"\n\t/é', max_size=5), depth=st.integers(0, 2))
def test_json_stays_json_and_the_secret_is_gone(secret, before, depth):
    mask = Mask([secret])
    value: object = {"text": before + secret, secret: [1, None, secret + before]}
    for _ in range(depth):
        value = {"nested": orjson.dumps(value).decode(), "more": 0}
    encoded = orjson.dumps(value)
    assert mask.suspects(encoded)
    found = orjson.loads(mask.json_bytes(encoded))
    for _ in range(depth):
        found = orjson.loads(found["nested"])
    assert secret not in str(list(found.values()))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("secret", "text", "expected"),
    [
        ("nabc12345678", '{"a":"\\nabc12345678"}', '{"a":"\\nabc12345678"}'),
        ("nabc12345678", '{"a":"\\nabc12345678, nabc12345678"}', '{"a":"\\nabc12345678, ***"}'),
        ("1234567890123456", '{"a":1234567890123456}', '{"a":"***"}'),
    ],
)
def test_json_within_a_string_stays_json(secret, text, expected):
    assert Mask([secret]).value(text) == expected


@pytest.mark.parametrize(
    "words",
    [["--api_key", KEY], [f"--api-key={KEY}"], [f"--api_kye={KEY}"], ["-k", KEY], [KEY], [f"--hf_token={KEY}"]],
)
def test_a_key_on_the_command_line_is_found(words):
    assert list(secrets_typed(words)) == [KEY]


@pytest.mark.parametrize("word", ["--max_tokens=none", "skeleton.jsonl", "--dataset_file=sk-prompts.jsonl", "--resume"])
def test_other_words_of_a_command_line_are_no_keys(word):
    assert not [value for value in secrets_typed([word]) if is_secret(value)]


# ── what we cut ourselves ─────────────────────────────────────────────────────────────────────────────────

SHORT = "sk-AbCdEf0123456789xyZqW"
"""Too short to be known again when a part of it is cut off."""


def cut_in(place: str, left: int) -> Answer:
    """An answer that is cut by us where `left` characters of the key are before the cut."""
    match place:
        case "error":
            return fail(400, "x" * (500 - left) + SHORT)
        case "page":
            return raw("<html><body>" + "x" * (200 - left) + SHORT + "</body></html>")
        case "refusal":
            return say(None, refusal="x" * (300 - left) + SHORT)
        case "written":
            return say("x" * (20_000 - left) + SHORT, finish_reason="content_filter")
        case "arguments":
            return call("terminal", '{"command": ' + "y" * (40 - left) + SHORT + '" oops', reasoning="r")
        case "arguments before":
            return call("terminal", '{"command": "' + SHORT + "y" * (38 - left) + '" oops', reasoning="r")
        case "value":
            return call("terminal", {"timeout": "y" * (79 - left) + SHORT, "command": "true"}, reasoning="r")
        case "output":
            return call("terminal", {"command": f"printf %0{20_000 - left}d 0; printf {SHORT}; printf %070000d 0"})
    return call("n" * (100 - left) + SHORT, {}, reasoning="r")


PLACES_OF_CUTS = (
    "error", "page", "refusal", "written", "arguments", "arguments before", "value", "output", "name",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES_OF_CUTS)
async def test_a_key_of_any_length_is_masked_before_we_cut(start_server, monkeypatch, place):
    monkeypatch.setattr(client, "RETRIES", RetryPolicy(max_attempts=1))
    lefts = [8, 12, 16, 20, 23]

    def script(request: RecordedRequest) -> Answer:
        return cut_in(place, int(request.prompt)) if request.turn == 0 else say("done", reasoning="r")

    server = await start_server(script)
    run = await run_inline(
        server.base_url, [str(left) for left in lefts], api_key=SHORT, batch_size=1, num_workers=5, sandbox="local",
        distribution="terminal_only",
    )  # fmt: skip
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert any(MASKED[:1] in path.read_text() for path in files)
    for path in files:
        assert not any(part in path.read_text() for part in (SHORT[:8], SHORT[-8:])), path


async def test_a_key_that_was_typed_where_it_does_not_belong_is_not_repeated():
    given = f"--api_key={SHORT}"
    for words in (
        [f"--api_kye={SHORT}"],
        ["-k", SHORT],
        [given, SHORT],
        [given, "--nonsense"],
        ["--api_key", SHORT, "x"],
    ):
        ended = await command(*words)
        assert ended.code == 2
        assert SHORT not in ended.stderr


# ── log records ───────────────────────────────────────────────────────────────────────────────────────────


def test_records_and_their_tracebacks_are_masked_for_every_handler(caplog):
    logger = logging.getLogger("promptmill.worker")
    with masked_records(Mask([KEY])):
        try:
            {}[f"the body was {KEY}"]
        except KeyError:
            logger.exception("it failed with %s", KEY)
    assert "it failed with ***" in caplog.text
    assert "KeyError: 'the body was ***'" in caplog.text
    assert KEY not in caplog.text
    assert logger.filters == []


# ── whole runs ────────────────────────────────────────────────────────────────────────────────────────────

ECHOES = {"raw": KEY, "base64": b64(f"key={KEY}"), "url": quote(KEY, safe=""), "other": OTHER}


def echo(request: RecordedRequest) -> Answer:
    """Say the key in some form, in text, reasoning, a call's arguments and name, through a tool, or in an error."""
    place, _, form = request.prompt.partition(" ")
    written = ECHOES[form]
    match place:
        case "text":
            return say(f"It is {written}.", reasoning="r")
        case "reasoning":
            return say("done", reasoning=f"It is {written}.")
        case "name":
            return call(f"tool_{written}", {}, reasoning="r") if request.turn == 0 else say("done")
        case "tool" if request.turn == 0:
            return call("terminal", {"command": f"echo '{written}' && echo '{written}' >&2"}, reasoning="r")
        case "refused":
            return fail(400, f"you sent {'x' * 250} {written}, which is wrong")
    return say("done", reasoning="r")


PLACES = ("text", "reasoning", "name", "tool", "refused")
PROMPTS = [f"{place} {form}" for place in PLACES for form in ECHOES]


def assert_no_secret(run: Path, ended: Ended) -> None:
    shown = [(path.name, path.read_bytes()) for path in run.rglob("*") if path.is_file()]
    for name, content in [*shown, ("stdout", ended.stdout.encode()), ("stderr", ended.stderr.encode())]:
        for form, written in ECHOES.items():
            # Of base64, what stands before and behind is not the key's.
            assert written[6:-4].encode() not in content, (name, form)


@pytest.mark.parametrize("engine", ["inline", "processes"])
async def test_a_key_that_is_echoed_is_in_no_file_and_no_output(start_server, engine):
    server = await start_server(echo)
    options = run_options(
        server.base_url, [{"prompt": prompt, "note": KEY} for prompt in PROMPTS],
        engine=engine, sandbox="local", distribution="terminal_only", verbose=True, system_prompt=f"Not {KEY}, please.",
    )  # fmt: skip
    ended = await command(*as_flags(options), f"--api_key={KEY}", "--log_prefix_chars=400", GITHUB_TOKEN=OTHER)
    assert ended.code == 1, ended.stderr
    assert {request.api_key for request in server.requests} == {KEY}
    run = Path("data/run")
    assert_no_secret(run, ended)
    rows = [orjson.loads(line) for path in run.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    assert len(rows) >= len(PROMPTS)
    assert all(MASKED in row["extra"] and orjson.loads(row["extra"]) for row in rows)
    for row in rows:
        calls = [call for turn in row["conversations"] for call in turn.get("tool_calls", ())]
        assert all(isinstance(orjson.loads(call["function"]["arguments"]), dict) for call in calls)
    assert "It is ***." in ended.stderr


async def test_an_error_that_stops_the_run_does_not_show_the_key(start_server):
    server = await start_server(lambda request: fail(401, f"Incorrect API key provided: {request.api_key}"))
    with pytest.raises(EndpointError, match=r"provided: \*\*\*") as caught:
        await run_inline(server.base_url, ["a"], api_key=KEY)
    assert caught.value.__suppress_context__
    ended = await command(*as_flags(run_options(server.base_url, None, run_name="again")), f"--api_key={KEY}")
    assert ended.code == 1
    assert "provided: ***" in ended.stderr
    assert_no_secret(Path("data/again"), ended)


async def test_ordinary_words_are_left_alone(start_server, monkeypatch):
    server = await start_server(lambda request: say("EMPTY is not a secret, and auto is no token", reasoning="r"))
    monkeypatch.setenv("APP_TOKEN", "secret")
    row = (await run_inline(server.base_url, ["a"], api_key="EMPTY")).row
    assert row["conversations"][-1]["value"].endswith("EMPTY is not a secret, and auto is no token")


async def test_a_row_of_a_run_without_echoes_is_untouched(start_server):
    server = await start_server(one_turn)
    row = (await run_inline(server.base_url, ["a"], api_key=KEY)).row
    assert row["conversations"][-1]["value"] == "<think>\nNo tool is needed.\n</think>\nanswer to a"
    assert MASKED not in str(row["conversations"])
