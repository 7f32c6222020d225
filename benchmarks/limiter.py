"""How close the adaptive limit stays to what an endpoint takes: `python -m benchmarks.limiter`.

A real server on loopback refuses (429) above a hidden limit of requests in service: 40, then 15, then 60. A run with
four worker processes has many more conversations than that. Printed for each phase: the mean in service over its second
half, as a share of the limit, and the refusals of the whole run as a share of all requests. The goal: at least 90 %,
under 2 %.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.model_server import Answer, RecordedRequest, ServerProcess, call, fail

REPOSITORY = Path(__file__).resolve().parents[1]
HIDDEN_LIMITS = (40, 15, 60)
LATENCY_S = (0.2, 0.6)
STARTUP_S = 10.0
"""The phases begin with the first request; the run is left alone for so much longer that the last one ends too."""
PHASE_VARIABLE, REPORT_VARIABLE = "BENCHMARK_PHASE_S", "BENCHMARK_REPORT"


class HiddenLimit:
    """The server's script: its state lives in the server's process."""

    def __init__(self) -> None:
        self.phase_s = float(os.environ.get(PHASE_VARIABLE, "60"))
        self.started_s: float | None = None
        self.in_service = self.requests = self.refusals = 0
        self.busy_s = [0.0] * len(HIDDEN_LIMITS)
        self.changed_s = 0.0

    def _account(self, now_s: float) -> None:
        for place in range(len(HIDDEN_LIMITS)):
            end_s = (place + 1) * self.phase_s
            overlap_s = min(now_s, end_s) - max(self.changed_s, end_s - self.phase_s / 2)
            self.busy_s[place] += self.in_service * max(0.0, overlap_s)
        self.changed_s = now_s

    async def __call__(self, request: RecordedRequest) -> Answer:
        del request
        clock_s = time.monotonic()
        self.started_s = clock_s if self.started_s is None else self.started_s
        now_s = clock_s - self.started_s
        place = min(int(now_s / self.phase_s), len(HIDDEN_LIMITS) - 1)
        self.requests += 1
        if self.in_service >= HIDDEN_LIMITS[place]:
            self.refusals += 1
            return fail(429, "too many requests at once")
        self._account(now_s)
        self.in_service += 1
        await asyncio.sleep(random.uniform(*LATENCY_S))
        self._account(time.monotonic() - self.started_s)
        self.in_service -= 1
        if self.requests % 50 == 0:
            self._report()
        return call("process", {"action": "list"}, reasoning="On it goes.")

    def _report(self) -> None:
        figures = {"busy_s": self.busy_s, "requests": self.requests, "refusals": self.refusals}
        Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(figures))


hidden_limit = HiddenLimit()


def main() -> None:
    """Run, and print the figures as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=128)
    parser.add_argument("--phase_s", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.conversations, options.phase_s)
    measured_s = options.phase_s / 2
    shares = [busy / measured_s / limit for busy, limit in zip(figures["busy_s"], HIDDEN_LIMITS, strict=True)]
    for limit, share in zip(HIDDEN_LIMITS, shares, strict=True):
        print(f"hidden limit {limit:3}: {100 * share:5.1f} % in service on average")
    refused = figures["refusals"] / figures["requests"]
    print(f"{figures['requests']:,} requests, {100 * refused:.2f} % of them refused")
    print(json.dumps({"shares": shares, "refused": refused, "requests": figures["requests"]}))


def measure(folder: Path, conversations: int, phase_s: float) -> dict[str, list[float] | int]:
    """One run of three phases; returns what the server counted."""
    report, dataset = folder / "report.json", folder / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(conversations)))
    os.environ |= {PHASE_VARIABLE: str(phase_s), REPORT_VARIABLE: str(report)}
    with ServerProcess("benchmarks.limiter:hidden_limit", max_recorded=0) as server:
        command = [sys.executable, str(REPOSITORY / "batch_runner.py"), f"--dataset_file={dataset}", "--run_name=run",
                   f"--output_dir={folder}", "--model=m", f"--base_url={server.base_url}", "--batch_size=1",
                   f"--num_workers={conversations}", "--max_turns=100000", "--distribution=terminal_only"]  # fmt: skip
        run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            _, said = run.communicate(timeout=len(HIDDEN_LIMITS) * phase_s + STARTUP_S)
            raise SystemExit(f"the run ended early: {said}")
        except subprocess.TimeoutExpired:
            figures: dict[str, list[float] | int] = json.loads(report.read_text())
        run.terminate()
        run.communicate()
    return figures


if __name__ == "__main__":
    main()
