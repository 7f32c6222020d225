"""What every test gets: no secrets or proxies in the environment, an empty working folder, a model server."""

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path

import hypothesis
import pytest

from tests.fakes.model_server import Script, ScriptedServer, three_turns

hypothesis.settings.register_profile("no_deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no_deadline")

PRIVATE_VARIABLE = re.compile(
    r"_(API_KEY|KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)$|^(OPENAI|ANTHROPIC|OPENROUTER)_|(^|_)PROXY$|^NETRC$",
    re.IGNORECASE,
)


NO_SKIPS = bool(os.environ.get("PROMPTMILL_NO_SKIPS"))
"""Whether a test of a real part that is missing here is a failure: `.ci/run` says so."""
DOES_NOT_APPLY = "does not apply: "
"""How the reason of a skip begins that is about no missing part, and is none under `NO_SKIPS` either."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test where nothing may be missing."""
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        if not reason.startswith(DOES_NOT_APPLY):
            report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped, and must not be here: {reason}"
    return report


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test can read or send a key of the developer's; a file made by a bare name goes to `tmp_path`."""
    for name in [name for name in os.environ if PRIVATE_VARIABLE.search(name)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


StartServer = Callable[[Script], Awaitable[ScriptedServer]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts scripted servers in the test's event loop: `server = await start_server(script)`."""
    async with AsyncExitStack() as stack:

        async def start(script: Script) -> ScriptedServer:
            return await stack.enter_async_context(ScriptedServer(script))

        yield start


@pytest.fixture
async def scripted_server(start_server: StartServer) -> ScriptedServer:
    """A server that runs `three_turns`; its `script` may be replaced."""
    return await start_server(three_turns)
