"""A prompt's own time: it ends the prompt, and stands still while the prompt waits for others."""

import asyncio
import math

import pytest

from promptmill.deadlines import PromptClock


async def test_the_time_ends_the_block():
    clock = PromptClock(0.01)
    with pytest.raises(TimeoutError):
        async with clock:
            await asyncio.Event().wait()
    assert clock.is_spent


async def test_paused_time_does_not_count():
    clock = PromptClock(0.2)
    async with clock:
        with clock.paused():
            await asyncio.sleep(0.4)  # the passing of time is the subject
        await asyncio.sleep(0)
    assert not clock.is_spent


async def test_after_a_pause_the_rest_still_ends_it():
    clock = PromptClock(0.05)

    async def pause_and_go_on_for_ever():
        with clock.paused():
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with clock:
            await pause_and_go_on_for_ever()


async def test_without_a_timeout_nothing_ends():
    async with PromptClock() as clock:
        with clock.paused():
            await asyncio.sleep(0)
    assert not clock.is_spent


async def test_another_timeout_inside_is_not_the_clock_s():
    clock = PromptClock(60)
    with pytest.raises(TimeoutError):
        async with clock, asyncio.timeout(0.01):
            await asyncio.Event().wait()
    assert not clock.is_spent


async def test_what_is_left_stands_still_during_a_pause():
    clock = PromptClock(60)
    async with clock:
        before_s = clock.left_s
        assert 59 < before_s <= 60
        with clock.paused():
            paused_s = clock.left_s
            await asyncio.sleep(0.02)
            assert clock.left_s == paused_s
        await asyncio.sleep(0.02)
        assert clock.left_s < paused_s
    assert PromptClock().left_s == math.inf
