"""The adaptive limit against a simulated endpoint, and the gate that holds conversations to it."""

import asyncio
import heapq
import random
from pathlib import Path

import pytest

from promptmill.limiter import AdaptiveLimit, Gate, GateOrder, GateReport, LimitKeeper
from tests.fakes.model_server import Answer, RecordedRequest, call, fail, one_turn, say
from tests.test_command import RunFiles, as_flags, command, run_options


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
    orders = keeper.take(1, GateReport(0, (0,), 9, said="slow down"))
    assert sum(order.share for order in orders.values()) == 38
    assert {order.generation for order in orders.values()} == {1}
    assert seen == [(38, 1, "slow down")]


def test_switched_off_every_gate_keeps_its_full_share():
    keeper = LimitKeeper(None, {0: 7}, lambda *_: None)
    assert keeper.first_share(0) == GateOrder(7, 0)
    assert keeper.take(0, GateReport(1, (0, 0), 3)) == {}


# ── fewer requests than workers ───────────────────────────────────────────────────────────────────────────


class Workers:
    """Gates and their keeper, with orders and reports on the way between them in any order across workers."""

    def __init__(self, limit: AdaptiveLimit, slots: dict[int, int], rng: random.Random) -> None:
        self.keeper = LimitKeeper(limit, slots, lambda *_: None)
        self.rng = rng
        self.up: dict[int, list[GateReport]] = {place: [] for place in slots}
        self.down: dict[int, list[GateOrder]] = {place: [] for place in slots}
        self.gates = {place: self.started(place) for place in slots}
        self.in_flight = self.most = 0

    def started(self, place: int) -> Gate:
        gate = Gate(99, self.up[place].append)
        gate.obey(self.keeper.first_share(place))
        return gate

    def send(self, orders: dict[int, GateOrder]) -> None:
        for place, order in orders.items():
            self.down[place].append(order)

    async def carry(self) -> None:
        """Deliver one message, whichever; those of one worker stay in order."""
        ways = [(self.up, place) for place in self.up if self.up[place]]
        ways += [(self.down, place) for place in self.down if self.down[place]]
        if ways:
            way, place = self.rng.choice(ways)
            if way is self.up:
                self.send(self.keeper.take(place, self.up[place].pop(0)))
            else:
                self.gates[place].obey(self.down[place].pop(0))
        await asyncio.sleep(0)

    async def converse(self, place: int, turns: int) -> None:
        gate = self.gates[place]
        for _ in range(turns):
            await gate.enter()
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            for _ in range(self.rng.randrange(5)):
                await asyncio.sleep(0)
            self.in_flight -= 1
            gate.leave()


@pytest.mark.parametrize("seed", range(20))
async def test_below_one_for_each_worker_the_limit_is_kept_and_every_conversation_ends(seed):
    rng = random.Random(seed)
    most = rng.randrange(1, 5)
    slots = {place: rng.randrange(1, 4) for place in range(rng.randrange(most + 1, 8))}
    workers = Workers(AdaptiveLimit(maximum=most, limit=most), slots, rng)
    tasks = {
        place: [asyncio.create_task(workers.converse(place, rng.randrange(1, 9))) for _ in range(count)]
        for place, count in slots.items()
    }
    async with asyncio.timeout(20):
        while tasks:
            await workers.carry()
            for place in [place for place, held in tasks.items() if all(task.done() for task in held)]:
                del tasks[place]
                if rng.random() < 0.5:  # it ends; what it was given is not lost
                    workers.up[place].clear()
                    workers.send(workers.keeper.gone(place))
    assert (workers.in_flight, workers.most <= most) == (0, True)


async def test_a_turn_for_a_conversation_that_waits_no_more_goes_to_another():
    workers = Workers(AdaptiveLimit(1, 1), {0: 1, 1: 1}, random.Random(0))
    given_up = asyncio.create_task(workers.converse(0, 1))
    for _ in range(3):
        await asyncio.sleep(0)
    while workers.down[0]:
        workers.gates[0].obey(workers.down[0].pop(0))
    workers.send(workers.keeper.take(0, workers.up[0].pop(0)))
    given_up.cancel()
    async with asyncio.timeout(5):
        other = asyncio.create_task(workers.converse(1, 3))
        while not other.done():
            await workers.carry()


def test_a_limit_that_falls_below_the_workers_takes_their_shares_and_gives_them_back_when_it_grows():
    limit = AdaptiveLimit(maximum=8, limit=4)
    keeper = LimitKeeper(limit, {0: 2, 1: 2, 2: 2, 3: 2}, lambda *_: None)
    assert [keeper.first_share(place).share for place in range(4)] == [1, 1, 1, 1]
    orders = keeper.take(0, GateReport(0, (0,), 0, waiting=1))
    assert {place: (order.share, order.turns) for place, order in orders.items()} == dict.fromkeys(range(4), (0, 0))
    assert limit.limit == 3
    # Nothing is free until the others have said what they have in flight.
    assert keeper.take(0, GateReport(0, (), 0, waiting=2, number=1)) == {}
    assert keeper.take(1, GateReport(0, (), 1, number=1)) == {}
    assert keeper.take(2, GateReport(0, (), 0, number=1)) == {0: GateOrder(0, 1, turns=1, number=2)}
    orders = keeper.take(1, GateReport(100, (), 0, number=1))
    assert limit.limit == 4
    assert {place: order.share for place, order in orders.items()} == dict.fromkeys(range(4), 1)


def test_the_share_of_a_worker_that_has_ended_is_for_the_others():
    keeper = LimitKeeper(AdaptiveLimit(6, 6), {0: 4, 1: 4}, lambda *_: None)
    assert [keeper.first_share(place).share for place in range(2)] == [3, 3]
    assert keeper.gone(0) == {1: GateOrder(6, 0)}
    assert keeper.first_share(0).share == 3
    assert keeper.take(1, GateReport(0, (), 6)) == {1: GateOrder(3, 0)}


@pytest.mark.parametrize(("limit", "workers"), [(1, 4), (2, 4), (3, 12)])
async def test_all_processes_together_keep_to_a_limit_below_their_number(start_server, limit, workers):
    async def script(request: RecordedRequest) -> Answer:
        await asyncio.sleep(0.03)
        return one_turn(request) if request.turn else call("terminal", {"command": "true"}, reasoning="r")

    server = await start_server(script)
    prompts = [f"prompt {number}" for number in range(13)]
    given = {"num_workers": workers, "batch_size": 1, "in_flight_limit": limit, "sandbox": "local"}
    ended = await command(*as_flags(run_options(server.base_url, prompts, **given)))
    assert (ended.code, server.max_in_flight, server.count) == (0, limit, 26), ended.stderr
    assert sorted(RunFiles(Path("data/run")).prompts) == sorted(prompts)


async def test_a_worker_that_dies_in_its_turn_does_not_keep_the_others_from_theirs(start_server):
    kill = {"command": "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)"}
    server = await start_server(
        lambda request: call("terminal", kill, reasoning="r") if request.prompt == "killer" else one_turn(request)
    )
    prompts = ["killer", *(f"prompt {number}" for number in range(8))]
    given = {"num_workers": 4, "batch_size": 1, "in_flight_limit": 1, "sandbox": "local"}
    ended = await command(*as_flags(run_options(server.base_url, prompts, **given)))
    assert (ended.code, server.max_in_flight) == (1, 1), ended.stderr
    assert sorted(RunFiles(Path("data/run")).prompts) == sorted(prompts[1:])


async def test_an_endpoint_that_takes_less_than_there_are_processes_is_not_asked_for_more_for_long(start_server):
    async def script(request: RecordedRequest) -> Answer:
        if server.in_flight > 1:
            return fail(429, "one at a time")
        await asyncio.sleep(0.02)
        return say("so", reasoning="r")

    server = await start_server(script)
    prompts = [f"prompt {number}" for number in range(40)]
    ended = await command(
        *as_flags(run_options(server.base_url, prompts, num_workers=4, batch_size=10, sandbox="local"))
    )
    assert (ended.code, server.statuses[200]) == (0, 40), ended.stderr
    assert server.statuses[429] <= 12
