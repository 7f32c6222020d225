"""The scripted model: how a prompt ends is its first word, and every request is counted, by run, start and prompt.

A run's endpoint is `/RUN/START/v1`, so that runs that are to be compared have the same prompts, and with them the same
content hashes and the same draws. `counts` asks for what was counted.
"""

import urllib.request
import zlib
from collections import Counter, defaultdict
from dataclasses import replace

import orjson

from tests.fakes.model_server import Answer, RecordedRequest, call, fail, no_reasoning, one_turn, raw, say

TURNS = {"plain": 1, "tools": 3, "discarded": 1, "partial": 1, "failed": 1, "filtered": 2}
"""Kind of prompt -> requests that one conversation makes."""
LASTING = {"command": "(setsid sleep 600 >/dev/null 2>&1 </dev/null &); echo started"}

_counts: defaultdict[str, Counter[str]] = defaultdict(Counter)


def kind_of(prompt: str) -> str:
    """How a prompt ends."""
    return prompt.split()[0]


def script(request: RecordedRequest) -> Answer:
    """Answer by the prompt's first word."""
    _, run, start, *_ = request.path.split("/")
    if run == "counts":
        return raw(orjson.dumps(_counts[start]))
    _counts[f"{run}.{start}"][request.prompt] += 1
    return answer(request)


def slow_script(request: RecordedRequest) -> Answer:
    """`script` after 50 to 200 ms; the tools leave a process running."""
    answered = script(request)
    if request.prompt and kind_of(request.prompt) == "tools" and request.turn == 1:
        answered = call("terminal", LASTING, reasoning="It may take long.")
    drawn = zlib.crc32(f"{request.path} {request.prompt} {request.turn}".encode()) % 100
    delay_s = 0.05 + 0.15 * drawn / 100
    return replace(answered, delay_s=delay_s)


def answer(request: RecordedRequest) -> Answer:
    """What a prompt of a kind is answered."""
    match kind_of(request.prompt):
        case "tools":
            return two_commands(request)
        case "discarded":
            return no_reasoning(request)
        case "partial":
            return say("cut off in the mid", reasoning="Too long.", finish_reason="length")
        case "failed":
            return fail(400)
        case "filtered" if request.turn == 0:
            return call("teleport", {"to": "the moon"}, reasoning="There is no such tool.")
    return one_turn(request)


def two_commands(request: RecordedRequest) -> Answer:
    """Two turns with a tool call each, then an answer with what the tools showed."""
    if request.turn < 2:
        command = {"command": f"echo step {request.turn} of {request.prompt}"}
        return call("terminal", command, id=f"call_{request.turn}", reasoning="I look.")
    return say(f"The tools said {' and '.join(request.tool_outputs)}", reasoning="That is it.")


def counts(proxy_url: str, run: str, start: int) -> Counter[str]:
    """Prompt -> requests of one start of a run."""
    asking = urllib.request.Request(f"{proxy_url}/counts/{run}.{start}/chat/completions", b"{}")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asking, timeout=30) as response:
        return Counter(orjson.loads(response.read()))


def base_url(proxy_url: str, run: str, start: int) -> str:
    """The endpoint of one start of a run."""
    return f"{proxy_url}/{run}/{start}/v1"
