"""A pytest plugin: a `Bench` in real sandboxes, closed after the test."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.toolbench import Bench
from toolsets.sandboxes import SANDBOXES, new_sandbox, sandbox_class
from toolsets.sandboxes.base import SandboxSpec


async def _open(backend: str) -> AsyncIterator[Bench]:
    sandbox = new_sandbox(backend, SandboxSpec(label="tools"))
    try:
        await sandbox.start()
        yield Bench(sandbox)
    finally:
        await sandbox.close()


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    """Tools in the backend that works everywhere."""
    async for opened in _open("local"):
        yield opened


@pytest_asyncio.fixture(params=sorted(SANDBOXES))
async def every_bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """Tools in each backend that works on this machine."""
    available = sandbox_class(request.param).availability()
    if not available.works:
        pytest.skip(f"{request.param} does not work here: {available.detail}")
    async for opened in _open(request.param):
        yield opened
