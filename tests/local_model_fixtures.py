"""A pytest plugin: the demonstration model's file."""

import asyncio
import os
from pathlib import Path

import pytest

from promptmill.demo_model import fetch_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model in the user's cache; fetched when it is not there yet."""
    return asyncio.run(fetch_demo_model(os.environ, print))
