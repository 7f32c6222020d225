"""How many requests may be in flight at once at an endpoint, all workers together.

An endpoint that is asked for more than it takes refuses (429, 529). `AdaptiveLimit` is the controller, one per run. It
lets the limit grow until a request is refused, then stays just below that level, and looks now and then whether more is
taken:

    growing     each success adds one: doubling in each round
    refused     the limit falls a little below the refused level, and further with each further refusal that a request
                sent after the fall meets. A burst (requests sent before the fall) counts once, and shows how many of
                them the endpoint took
    recovering  one more for each round of successes, until just below the refused level
    probing     one more only after many successes; when two steps past the refused level are taken, growing again

So an endpoint with a fixed limit refuses about one request in two hundred, and what is in flight stays within a few
percent of what it takes; halving on each refusal would average three quarters.

`Gate` is one worker's share of it: its conversations wait there, and it tells the controller how they fare.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SUCCESSES_PER_PROBE = 100
DECREASES = (0.97, 0.9, 0.8, 0.7)
"""Factors of the limit at a refusal, at the next one that follows without a success in between, and so on."""
FIRST_LIMIT = 64
"""Where the limit starts at an endpoint that others use too; a server of one's own starts at the maximum."""
REPORT_INTERVAL_S = 0.1


@dataclass(slots=True)
class AdaptiveLimit:
    """The controller. Times nothing itself: it is told what happened."""

    maximum: int
    limit: int
    generation: int = 0
    """Counts the falls; a request carries the one it was sent under."""
    refusals: int = 0
    _refused_level: int | None = None
    _successes: int = 0
    _falls: int = 0

    def succeeded(self, count: int = 1) -> None:
        """Some requests were answered."""
        self._successes += count
        if self._refused_level is None:
            self._grow(count)
        elif self.limit < self._refused_level - 1:
            self._grow_after(self.limit)
        elif self.limit > self._refused_level + 1:
            self._refused_level = None
        else:
            self._grow_after(max(SUCCESSES_PER_PROBE, 2 * self.limit))

    def _grow_after(self, successes: int) -> None:
        if self._successes >= successes:
            self._grow(1)

    def _grow(self, step: int) -> None:
        self.limit = min(self.maximum, self.limit + step)
        self._successes = self._falls = 0

    def refused(self, generation: int, in_flight: int) -> None:
        """A request was refused.

        Args:
            generation: The one it was sent under.
            in_flight: How many others are in flight now.
        """
        self.refusals += 1
        if generation < self.generation:
            # The same burst: those that are still in flight are what the endpoint took of it.
            if in_flight < self.limit:
                self.limit = max(in_flight, 1)
                self._refused_level = self.limit + 1
            return
        self.generation += 1
        self._refused_level = self.limit
        factor = DECREASES[min(self._falls, len(DECREASES) - 1)]
        self._falls += 1
        self._successes = 0
        self.limit = max(1, min(self.limit - 1, int(self.limit * factor)))


@dataclass(frozen=True, slots=True)
class GateReport:
    """What happened at one worker's gate since its last report."""

    successes: int
    refused_generations: tuple[int, ...]
    """One entry per refusal: the generation the request was sent under."""
    in_flight: int


@dataclass(frozen=True, slots=True)
class GateOrder:
    """What the controller tells one worker's gate."""

    share: int
    """How many requests it may have in flight."""
    generation: int


class Gate:
    """Where a worker's conversations wait for their turn to send a request."""

    def __init__(self, share: int, report: Callable[[GateReport], None] = lambda _report: None) -> None:
        self._order = GateOrder(share, 0)
        self._report = report
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._successes = 0
        self._refused: list[int] = []
        self._flush: asyncio.TimerHandle | None = None

    def obey(self, order: GateOrder) -> None:
        """Take another share. What is in flight beyond it is not called back."""
        self._order = order
        self._let_in()

    async def enter(self) -> int:
        """Wait for a place; returns the generation to report a refusal with. Every `enter` needs its `leave`."""
        if self._in_flight < self._order.share and not self._waiting:
            self._in_flight += 1
            return self._order.generation
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        return self._order.generation

    def leave(self) -> None:
        """Give the place to the next who waits."""
        self._in_flight -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._in_flight < self._order.share:
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)

    def succeeded(self) -> None:
        """A request was answered, whatever it said."""
        self._successes += 1
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._send_report)

    def refused(self, generation: int) -> None:
        """A request was refused for want of room; told at once, before its place is left."""
        self._refused.append(generation)
        self._send_report(others=self._in_flight - 1)

    def _send_report(self, others: int | None = None) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        report = GateReport(self._successes, tuple(self._refused), self._in_flight if others is None else others)
        self._successes, self._refused = 0, []
        self._report(report)

    def close(self) -> None:
        """Report no more."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None


class LimitKeeper:
    """The controller and the shares it hands out; lives where the runner does.

    Args:
        limit: The controller; None switches limiting off, and every gate keeps its full share.
        slots: Conversations of each worker, by its place: what the limit is shared by.
        changed: Told the limit and the refusals so far, when either has changed.
    """

    def __init__(self, limit: AdaptiveLimit | None, slots: dict[int, int], changed: Callable[[int, int], None]) -> None:
        self._limit = limit
        self._slots = slots
        self._changed = changed
        self._in_flight = dict.fromkeys(slots, 0)
        self._orders: dict[int, GateOrder] = {}

    def first_share(self, place: int) -> GateOrder:
        """What a worker starts with."""
        self._orders[place] = self._share(place)
        # Until it says otherwise it is taken to use all of it: guessed too low, a burst would show too small a limit.
        self._in_flight[place] = self._orders[place].share
        return self._orders[place]

    def take(self, place: int, report: GateReport) -> dict[int, GateOrder]:
        """Learn from a worker's report; returns the new orders, by place, where they changed."""
        if self._limit is None:
            return {}
        before = (self._limit.limit, self._limit.refusals)
        self._in_flight[place] = report.in_flight
        if report.successes:
            self._limit.succeeded(report.successes)
        for generation in report.refused_generations:
            self._limit.refused(generation, sum(self._in_flight.values()))
        if (self._limit.limit, self._limit.refusals) != before:
            self._changed(self._limit.limit, self._limit.refusals)
        orders = {place: self._share(place) for place in self._orders}
        changed = {place: order for place, order in orders.items() if order != self._orders[place]}
        self._orders |= changed
        return changed

    def _share(self, place: int) -> GateOrder:
        """A worker's part of the limit, by its slots; together the parts are the limit, and each has at least one."""
        if self._limit is None:
            return GateOrder(self._slots[place], 0)
        total = sum(self._slots.values())
        before = sum(slots for other, slots in self._slots.items() if other < place)
        upto = self._limit.limit * (before + self._slots[place]) // total
        return GateOrder(max(1, upto - self._limit.limit * before // total), self._limit.generation)
