"""The child process of `local_model`: llama.cpp's server, its address told over a pipe. Run as a file, not imported.

It imports nothing of promptmill, so it starts wherever the interpreter that runs it has xllamacpp, and in no time.

Protocol
    argv[1] is a JSON object: `model_path`, `num_slots`, `context_tokens` (of all slots together), `num_threads`.
    stdout carries one JSON line once the server is healthy: `base_url`, `knows_tools`.
    stdin carries nothing; its end is the order to end, and comes by itself when the parent dies.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import urllib.request
from typing import Any

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def main() -> None:
    """Load the model, serve it, and end with the parent."""
    _end_with_parent()
    report = _take_stdout()
    server, address = _start_server(json.loads(sys.argv[1]))
    _get_json(f"{address}/health")
    template = _get_json(f"{address}/props").get("chat_template_caps", {})
    answer = {"base_url": f"{address}/v1", "knows_tools": bool(template.get("supports_tools"))}
    with os.fdopen(report, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer) + "\n")
    threading.Event().wait()
    del server  # it serves as long as it is referenced


def _end_with_parent() -> None:
    # Two ways, since each has a gap: the kernel's signal is Linux only and follows the parent's thread, and the
    # pipe is not seen while the library holds the interpreter's lock, as it does while it loads.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_at_end_of_input, daemon=True).start()


def _end_at_end_of_input() -> None:
    while os.read(0, 4096):
        continue
    # Not sys.exit: nothing is to be saved, and the server's threads would not end with this one.
    os._exit(0)


def _take_stdout() -> int:
    """Keep stdout for the one line, and give whatever the library prints to stderr."""
    report = os.dup(1)
    os.dup2(2, 1)
    return report


def _start_server(order: dict[str, Any]) -> tuple[object, str]:
    import xllamacpp  # here, so that the parent's death is watched while it loads

    params = xllamacpp.CommonParams()
    params.model.path = order["model_path"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = order["num_slots"]
    params.n_ctx = order["context_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = order["num_threads"]
    params.verbosity = 1  # errors only
    params.ui = params.endpoint_slots = False
    # By default it keeps up to 8 GiB of former prompts, which a laptop does not have to spare.
    params.cache_ram_mib = 256
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as exc:
        # What was wrong, the library has printed by now; a traceback would only push it out of the parent's sight.
        sys.exit(str(exc))
    return server, server.listening_address


def _get_json(url: str) -> dict[str, Any]:
    # No proxy from the environment: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as response:
        data: dict[str, Any] = json.load(response)
    return data


if __name__ == "__main__":
    main()
