"""The adaptive limit against a simulated endpoint, and the gate that holds conversations to it."""

import asyncio
import heapq
import random

import pytest

from promptmill.limiter import AdaptiveLimit, Gate, GateOrder, GateReport, LimitKeeper


class SimulatedEndpoint:
    """Takes a number of requests at once, refuses the rest; time is simulated, so an hour takes a second."""

    def __init__(
        self, limit: AdaptiveLimit, phases: list[tuple[float, int]], conversations: int, seed: int = 0
    ) -> None:
        self.limit = limit
        self.phases = phases
        self.waiting = conversations
        self.rng = random.Random(seed)
        self.in_flight = self.in_service = self.refusals = self.requests = 0

    def capacity(self, now: float) -> int:
        for length, capacity in self.phases:
            if now < length:
                return capacity
            now -= length
        return self.phases[-1][1]

    def run(self) -> list[float]:
        """The mean in service over the last 30 seconds of each phase, as a share of its capacity."""
        ends = [sum(length for length, _ in self.phases[: place + 1]) for place in range(len(self.phases))]
        busy = [0.0] * len(ends)
        now, number, queue = 0.0, 0, []
        while now < ends[-1]:
            while self.waiting and self.in_flight < self.limit.limit:
                self.waiting -= 1
                self.in_flight += 1
                number += 1
                heapq.heappush(queue, (now + 0.002, number, "arrives", self.limit.generation))
            later, _, event, generation = heapq.heappop(queue)
            for place, end in enumerate(ends):
                busy[place] += self.in_service * max(0.0, min(later, end) - max(now, end - 30))
            now = later
            number += 1
            if (after := self.happens(event, generation, now)) is not None:
                heapq.heappush(queue, (now + after[0], number, after[1], generation))
        return [total / 30 / capacity for total, (_, capacity) in zip(busy, self.phases, strict=True)]

    def happens(self, event: str, generation: int, now: float) -> tuple[float, str] | None:
        if event == "arrives":
            self.requests += 1
            if self.in_service >= self.capacity(now):
                self.refusals += 1
                return (0.002, "is refused")
            self.in_service += 1
            return (self.rng.uniform(0.15, 0.45), "is served")
        if event == "is served":
            self.in_service -= 1
            self.in_flight -= 1
            self.waiting += 1
            self.limit.succeeded()
            return None
        if event == "is refused":
            self.in_flight -= 1
            self.limit.refused(generation, self.in_flight)
            return (self.rng.uniform(0.5, 1.0), "comes back")
        self.waiting += 1
        return None


@pytest.mark.parametrize("conversations", [64, 128, 256])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_limit_follows_an_endpoint_whose_limit_changes(conversations, seed):
    limit = AdaptiveLimit(maximum=conversations, limit=conversations)
    endpoint = SimulatedEndpoint(limit, [(60, 40), (60, 15), (60, 60)], conversations, seed)
    assert min(endpoint.run()) >= 0.95
    assert endpoint.refusals / endpoint.requests < 0.02


def test_an_endpoint_that_never_refuses_is_not_held_back():
    limit = AdaptiveLimit(maximum=200, limit=64)
    endpoint = SimulatedEndpoint(limit, [(40, 1000)], conversations=200)
    endpoint.run()
    assert (limit.limit, endpoint.refusals) == (200, 0)


def test_a_burst_of_refusals_counts_once():
    limit = AdaptiveLimit(maximum=100, limit=100)
    for others in range(99, 39, -1):
        limit.refused(0, others)
    assert (limit.generation, limit.limit, limit.refusals) == (1, 40, 60)


def test_the_limit_never_falls_below_one():
    limit = AdaptiveLimit(maximum=4, limit=2)
    for generation in range(20):
        limit.refused(generation, 0)
    assert limit.limit == 1


async def test_a_gate_lets_in_as_many_as_its_share_in_order_of_arrival():
    gate, entered = Gate(2), []

    async def conversation(name):
        await gate.enter()
        entered.append(name)

    tasks = [asyncio.create_task(conversation(name)) for name in "abcd"]
    await asyncio.sleep(0)
    assert entered == ["a", "b"]
    gate.leave()
    await asyncio.sleep(0)
    assert entered == ["a", "b", "c"]
    gate.obey(GateOrder(3, 1))
    await asyncio.gather(*tasks)
    assert entered == ["a", "b", "c", "d"]


async def test_a_cancelled_waiter_neither_holds_nor_loses_a_place():
    gate = Gate(1)
    await gate.enter()
    waiting = [asyncio.create_task(gate.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.leave()  # the first of them has the place now, and does not know it yet
    waiting[0].cancel()
    async with asyncio.timeout(5):
        assert await waiting[1] == 0
    assert waiting[0].cancelled() or waiting[0].cancelling()


async def test_a_refusal_is_reported_at_once_and_successes_together():
    reports: list[GateReport] = []
    reported = asyncio.Event()

    def report(news):
        reports.append(news)
        reported.set()

    gate = Gate(5, report)
    for _ in range(3):
        await gate.enter()
        gate.succeeded()
        gate.leave()
    assert reports == []
    async with asyncio.timeout(5):
        await reported.wait()
    assert reports == [GateReport(3, (), 0)]
    generation = await gate.enter()
    gate.refused(generation)
    gate.leave()
    assert reports[1:] == [GateReport(0, (0,), 0)]
    gate.close()


def test_the_shares_are_the_limit_and_follow_it():
    seen = []
    keeper = LimitKeeper(AdaptiveLimit(40, 40), {0: 20, 1: 10, 2: 10}, lambda *news: seen.append(news))
    assert [keeper.first_share(place).share for place in range(3)] == [20, 10, 10]
    orders = keeper.take(1, GateReport(0, (0,), 9))
    assert sum(order.share for order in orders.values()) == 38
    assert {order.generation for order in orders.values()} == {1}
    assert seen == [(38, 1)]


def test_switched_off_every_gate_keeps_its_full_share():
    keeper = LimitKeeper(None, {0: 7}, lambda *_: None)
    assert keeper.first_share(0) == GateOrder(7, 0)
    assert keeper.take(0, GateReport(1, (0, 0), 3)) == {}
