"""One scripted server and one warm process for all kills of a test process."""

import os
from collections.abc import Iterator

import pytest

from tests.crashes.harness import Harness
from tests.fakes.model_server import ServerProcess

SCALE = int(os.environ.get("PROMPTMILL_CRASHES", "1"))
"""How many times as many cases."""


@pytest.fixture(scope="session")
def crash_server() -> Iterator[ServerProcess]:
    with ServerProcess("tests.crashes.scripts:script", max_recorded=1) as server:
        yield server


@pytest.fixture(scope="session")
def harness(crash_server: ServerProcess) -> Iterator[Harness]:
    with Harness(crash_server.proxy_url) as harness:
        yield harness
