"""A scripted OpenAI-compatible model server that speaks real HTTP, so that tests exercise the real client.

A script is a function `RecordedRequest -> Answer` (it may be async). An answer is made by `say`, `call`,
`calls`, `fail`, `raw` or `drop`, each of which takes `delay_s`.

In the test's own event loop:

    async with ScriptedServer(lambda request: say("done", reasoning="easy")) as server:
        ...server.base_url, server.requests, server.max_in_flight

As a process of its own, for big runs (it ends with the test process, whatever happens to that):

    with ServerProcess("three_turns") as server:
        ...server.base_url, server.counters(), server.requests()

Both are a plain HTTP proxy too: with `HTTP_PROXY=server.proxy_url`, a request for http://openrouter.ai/...
arrives here, and its `RecordedRequest.host` says so. No request ever leaves the machine.

A request that asks for a stream gets one: a scripted completion is cut into pieces. `events` scripts the pieces.
"""

import argparse
import asyncio
import hashlib
import inspect
import json
import subprocess
import sys
import threading
import urllib.request
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from tests.fakes.streams import DONE, as_stream, event

REPOSITORY = Path(__file__).resolve().parents[2]
CONTROL_PREFIX = "/_control/"
DEFAULT_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


# ── what was asked ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it came in."""

    number: int
    """From 1, in order of arrival."""
    method: str
    host: str
    """Without the port; the real host's name when we are its proxy."""
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Mapping[str, Any]
    """Decoded; empty when it is no JSON object."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return self.body.get("messages") or ()

    @property
    def prompt(self) -> str:
        """The last user message."""
        return next((text_of(m) for m in reversed(self.messages) if m.get("role") == "user"), "")

    @property
    def first_prompt(self) -> str:
        """The first user message: another than `prompt` when there are prefill messages."""
        return next((text_of(m) for m in self.messages if m.get("role") == "user"), "")

    @property
    def system(self) -> list[str]:
        """All system messages."""
        return [text_of(m) for m in self.messages if m.get("role") == "system"]

    @property
    def turn(self) -> int:
        """How often the model has answered since the last user message."""
        roles = [m.get("role") for m in self.messages]
        since = len(roles) - roles[::-1].index("user") if "user" in roles else 0
        return roles[since:].count("assistant")

    @property
    def tool_outputs(self) -> list[str]:
        """What the tools answered, in order."""
        return [text_of(m) for m in self.messages if m.get("role") == "tool"]

    @property
    def tool_names(self) -> list[str]:
        """The tools offered."""
        return [tool["function"]["name"] for tool in self.body.get("tools") or ()]

    @property
    def api_key(self) -> str:
        """What came as bearer token."""
        return self.headers.get("authorization", "").removeprefix("Bearer ")


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


# ── what is answered ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes to send, or a connection to drop."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    dropped: bool = False
    """Close the connection after `body`, which then is sent as it is: no status line is added."""


Script = Callable[[RecordedRequest], Answer | Awaitable[Answer]]


def say(
    text: str | None,
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = DEFAULT_USAGE,
    delay_s: float = 0.0,
    **message_fields: Any,
) -> Answer:
    """A chat completion.

    Args:
        text: The message's content.
        reasoning: Sent as `reasoning_content`; for other places give the field itself, e.g.
            `reasoning_details=[...]`.
        tool_calls: Made by `tool_call`.
        finish_reason: By default `tool_calls` or `stop`, as fits.
        usage: None leaves it out.
        message_fields: Further fields of the message.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return completion(
        message | message_fields,
        finish_reason=finish_reason or ("tool_calls" if tool_calls else "stop"),
        usage=usage,
        delay_s=delay_s,
    )


def call(name: str, arguments: Any = None, *, reasoning: str | None = None, id: str = "call_1", **rest: Any) -> Answer:
    """A reply that calls one tool. See `tool_call` for `arguments`, and `say` for the rest."""
    return say(rest.pop("text", None), reasoning=reasoning, tool_calls=[tool_call(name, arguments, id=id)], **rest)


def calls(entries: Sequence[tuple[str, Any]], *, reasoning: str | None = None, **rest: Any) -> Answer:
    """A reply that calls several tools, given as (name, arguments), with the ids `call_1`, `call_2`, …"""
    made = [tool_call(name, arguments, id=f"call_{n}") for n, (name, arguments) in enumerate(entries, start=1)]
    return say(rest.pop("text", None), reasoning=reasoning, tool_calls=made, **rest)


def tool_call(name: str, arguments: Any = None, *, id: str | None = "call_1") -> dict[str, Any]:
    """One entry of `tool_calls`. A mapping is sent as JSON text, as OpenAI does; anything else as it is."""
    encoded = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
    entry: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": encoded}}
    return entry if id is None else {"id": id, **entry}


def completion(
    message: Mapping[str, Any],
    *,
    finish_reason: str | None = "stop",
    usage: Mapping[str, Any] | None = DEFAULT_USAGE,
    delay_s: float = 0.0,
) -> Answer:
    """A chat completion around a message of any shape."""
    body: dict[str, Any] = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if usage is not None:
        body["usage"] = usage
    return raw(orjson.dumps(body), delay_s=delay_s)


def fail(
    status: int, message: str = "scripted failure", *, headers: Mapping[str, str] | None = None, **rest: Any
) -> Answer:
    """An HTTP error with a body of OpenAI's shape; further keywords become fields of its `error`."""
    delay_s = rest.pop("delay_s", 0.0)
    body = orjson.dumps({"error": {"message": message, "type": "scripted", **rest}})
    return replace(raw(body, status=status, delay_s=delay_s), headers=dict(headers or {}))


def raw(body: bytes | str, *, status: int = 200, delay_s: float = 0.0) -> Answer:
    """Any body, JSON or not."""
    return Answer(body.encode() if isinstance(body, str) else body, status=status, delay_s=delay_s)


def events(*chunks: object, done: bool = True, delay_s: float = 0.0) -> Answer:
    """A stream of these chunks, whatever was asked for; bytes are sent as they are."""
    body = b"".join(chunk if isinstance(chunk, bytes) else event(chunk) for chunk in chunks)
    answer = raw(body + (DONE if done else b""), delay_s=delay_s)
    return replace(answer, headers={"Content-Type": "text/event-stream"})


def drop(sent_before: bytes = b"", *, delay_s: float = 0.0) -> Answer:
    """Close the connection, after sending some bytes if any: `drop(HALF_A_REPLY)` breaks off in a body."""
    return Answer(sent_before, dropped=True, delay_s=delay_s)


HALF_A_REPLY = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"choices": ['


# ── scripts ───────────────────────────────────────────────────────────────────────────────────────────


def in_order(*answers: Answer) -> Script:
    """Answer the first request with the first answer and so on; the last answer is repeated."""
    return lambda request: answers[min(request.number, len(answers)) - 1]


def by_turn(*answers: Answer) -> Script:
    """Answer by turn of the conversation; the last answer is repeated."""
    return lambda request: answers[min(request.turn, len(answers) - 1)]


def token_of(prompt: str) -> str:
    """A word that stands for a prompt in `three_turns`."""
    return "token" + hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()


def final_answer(prompt: str) -> str:
    """What `three_turns` ends with when the tool really ran: its output is part of the answer."""
    return f"The sandbox said {token_of(prompt)}."


def three_turns(request: RecordedRequest) -> Answer:
    """Run `echo` on the prompt's token, write (or echo) it again, then answer with what the tools showed.

    Every turn has reasoning. A conversation that is offered neither tool is answered at once.
    """
    token = token_of(request.prompt)
    tools = request.tool_names
    first = "terminal" if "terminal" in tools else "write_file"
    second = "write_file" if "write_file" in tools else "terminal"
    if request.turn < 2 and first in tools:
        name = (first, second)[request.turn]
        arguments = {"command": f"echo {token}"} if name == "terminal" else {"path": "note.txt", "content": token}
        return call(name, arguments, id=f"call_{request.turn}_{token}", reasoning=f"Step {request.turn}: use {name}.")
    shown = token if any(token in output for output in request.tool_outputs) else "nothing"
    return say(f"The sandbox said {shown}.", reasoning="I have what I need.")


def one_turn(request: RecordedRequest) -> Answer:
    """Answer at once, with reasoning."""
    return say(f"answer to {request.prompt}", reasoning="No tool is needed.")


def no_reasoning(request: RecordedRequest) -> Answer:
    """Answer at once, without reasoning."""
    return say(f"answer to {request.prompt}")


SCRIPTS: dict[str, Script] = {"three_turns": three_turns, "one_turn": one_turn, "no_reasoning": no_reasoning}
"""What `ServerProcess` knows by name; any other importable script is `module:function`."""


def script_named(name: str) -> Script:
    module, colon, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if colon else SCRIPTS[name]


# ── the server, in this event loop ────────────────────────────────────────────────────────────────────


class ScriptedServer:
    """The server within the running event loop; an async context manager."""

    def __init__(self, script: Script = three_turns, *, delay_s: float = 0.0, max_recorded: int | None = None) -> None:
        """Args:
        script: May be replaced while the server runs.
        delay_s: Added to every answer.
        max_recorded: How many of the newest requests are kept.
        """
        self.script = script
        self.delay_s = delay_s
        self.requests: deque[RecordedRequest] | list[RecordedRequest]
        self.requests = [] if max_recorded is None else deque(maxlen=max_recorded)
        self.statuses: Counter[int] = Counter()
        """How often each status was sent; 0 stands for a dropped connection."""
        self.in_flight = 0
        self.max_in_flight = 0
        self.count = 0
        self.base_url = ""
        self.proxy_url = ""
        self._runner: web.ServerRunner | None = None

    @property
    def bodies(self) -> list[Mapping[str, Any]]:
        """The bodies of the requests."""
        return [request.body for request in self.requests]

    @property
    def prompts(self) -> list[str]:
        """The prompt of each request."""
        return [request.prompt for request in self.requests]

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        port = self._runner.addresses[0][1]
        self.proxy_url = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.proxy_url}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.startswith(CONTROL_PREFIX):
            return web.Response(body=orjson.dumps(self._control(request.path.removeprefix(CONTROL_PREFIX))))
        body = await request.read()
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            recorded = self._record(request, body)
            answer = _streamed(await self._answer(recorded), recorded)
            if delay_s := answer.delay_s + self.delay_s:
                await asyncio.sleep(delay_s)
        finally:
            self.in_flight -= 1
        self.statuses[0 if answer.dropped else answer.status] += 1
        if answer.dropped:
            return _break_off(request, answer)
        headers = {"Content-Type": "application/json", **answer.headers}
        return web.Response(body=answer.body, status=answer.status, headers=headers)

    def _record(self, request: web.BaseRequest, body: bytes) -> RecordedRequest:
        self.count += 1
        try:
            decoded = orjson.loads(body)
        except orjson.JSONDecodeError:
            decoded = {}
        recorded = RecordedRequest(
            number=self.count,
            method=request.method,
            host=request.url.host or "",
            path=request.path,
            headers={name.lower(): value for name, value in request.headers.items()},
            body=decoded if isinstance(decoded, dict) else {},
        )
        self.requests.append(recorded)
        return recorded

    async def _answer(self, request: RecordedRequest) -> Answer:
        if request.method == "GET" and request.path.endswith("/models"):
            return raw(orjson.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]}))
        if request.method != "POST" or not request.path.endswith("/chat/completions"):
            return fail(404, f"no such route: {request.method} {request.path}")
        answer = self.script(request)
        return await answer if inspect.isawaitable(answer) else answer

    def _control(self, name: str) -> object:
        if name == "counters":
            return {
                "requests": self.count,
                "max_in_flight": self.max_in_flight,
                "statuses": {str(status): count for status, count in self.statuses.items()},
            }
        if name == "requests":
            return [asdict(request) for request in self.requests]
        if name == "clear":
            self.requests.clear()
            self.statuses.clear()
            self.count = self.max_in_flight = 0
        return None


def _streamed(answer: Answer, request: RecordedRequest) -> Answer:
    """An answer as the stream that was asked for; as it is where it is an error or no JSON object."""
    if not request.body.get("stream") or answer.status != 200 or answer.dropped or answer.headers:
        return answer
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return answer
    if not isinstance(body, dict):
        return answer
    include_usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
    stream = as_stream(body, include_usage=include_usage)
    return replace(answer, body=stream, headers={"Content-Type": "text/event-stream"})


def _break_off(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    transport = request.transport
    if transport is not None:
        if answer.body:
            transport.write(answer.body)
            transport.close()
        else:
            transport.abort()
    return _Unsent()


class _Unsent(web.StreamResponse):
    """For a connection that is closed: writes nothing to it."""

    async def prepare(self, request: web.BaseRequest) -> None:
        self._eof_sent = True

    async def write_eof(self, data: bytes = b"") -> None:
        del data


# ── the server, as a process ──────────────────────────────────────────────────────────────────────────


class ServerProcess:
    """The server as a process of its own; a context manager. It ends when this process does."""

    def __init__(self, script: str = "three_turns", *, delay_s: float = 0.0, max_recorded: int = 100_000) -> None:
        """Args:
        script: A name of `SCRIPTS`, or `module:function`.
        """
        self._command = [
            sys.executable, "-m", "tests.fakes.model_server",
            f"--script={script}", f"--delay_s={delay_s}", f"--max_recorded={max_recorded}",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.base_url = ""
        self.proxy_url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise RuntimeError("the scripted server did not start; its error is on stderr")
        self.proxy_url = line.decode().strip()
        self.base_url = f"{self.proxy_url}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def counters(self) -> dict[str, Any]:
        """`requests`, `max_in_flight`, and `statuses` by status code."""
        return self._ask("counters")

    def requests(self) -> list[RecordedRequest]:
        """The newest `max_recorded` requests."""
        return [RecordedRequest(**fields) for fields in self._ask("requests")]

    def clear(self) -> None:
        """Forget all requests and counters."""
        self._ask("clear")

    def _ask(self, name: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.proxy_url}{CONTROL_PREFIX}{name}", timeout=30) as response:
            return orjson.loads(response.read())


async def serve_until_stdin_ends(script: Script, *, delay_s: float, max_recorded: int) -> None:
    """Print the address, and serve until whoever started us closes our stdin or ends."""
    async with ScriptedServer(script, delay_s=delay_s, max_recorded=max_recorded) as server:
        print(server.proxy_url, flush=True)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wait_for_end() -> None:
            sys.stdin.buffer.read()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait_for_end, daemon=True).start()
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A scripted OpenAI-compatible server; it ends when its stdin does.")
    parser.add_argument("--script", default="three_turns", help=f"{', '.join(SCRIPTS)}, or module:function")
    parser.add_argument("--delay_s", type=float, default=0.0, help="added to every answer")
    parser.add_argument("--max_recorded", type=int, default=100_000, help="how many requests are kept")
    options = parser.parse_args()
    serving = serve_until_stdin_ends(
        script_named(options.script), delay_s=options.delay_s, max_recorded=options.max_recorded
    )
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


if __name__ == "__main__":
    main()
