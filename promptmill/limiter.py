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
`LimitKeeper` hands the shares out. Where there is less than one request for each worker, the shares are 0, and a worker
in which a conversation waits is given turns, one for each request, by whose end they are free for the next worker.
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
    waiting: int = 0
    """Conversations that wait for their turn."""
    number: int = 0
    """Of the newest order that it knows."""
    said: str = ""
    """What the endpoint said with its last refusal."""


@dataclass(frozen=True, slots=True)
class GateOrder:
    """What the controller tells one worker's gate."""

    share: int
    """How many requests it may have in flight."""
    generation: int
    turns: int = 0
    """How many more may be sent now, beyond the share."""
    number: int = 0
    """Counts the orders after which the controller must hear from the gate before it knows what is in flight there."""


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
        is_numbered = order.number > self._order.number
        self._order = order
        self._let_in(order.turns)
        if is_numbered:
            self._send_report()

    async def enter(self) -> int:
        """Wait for a place; returns the generation to report a refusal with. Every `enter` needs its `leave`."""
        if self._in_flight < self._order.share and not self._waiting:
            self._in_flight += 1
            return self._order.generation
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if not self._order.share:
            self._send_report()
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
        if not self._order.share:
            self._send_report()

    def _let_in(self, turns: int = 0) -> None:
        room = max(self._order.share - self._in_flight, turns)
        while self._waiting and room > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                room -= 1
                self._in_flight += 1
                turn.set_result(None)

    def succeeded(self) -> None:
        """A request was answered, whatever it said."""
        self._successes += 1
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._send_report)

    def refused(self, generation: int, said: str = "") -> None:
        """A request was refused for want of room; told at once, before its place is left."""
        self._refused.append(generation)
        self._send_report(others=self._in_flight - 1, said=said)

    def _send_report(self, others: int | None = None, said: str = "") -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        in_flight = self._in_flight if others is None else others
        waiting = sum(not turn.done() for turn in self._waiting)
        report = GateReport(self._successes, tuple(self._refused), in_flight, waiting, self._order.number, said)
        self._successes, self._refused = 0, []
        self._report(report)

    def close(self) -> None:
        """Report no more."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None


@dataclass(slots=True)
class _Place:
    """One worker, as the keeper knows it."""

    slots: int
    """Conversations of it: what the limit is shared by."""
    order: GateOrder | None = None
    """The last one it was given; None where no worker has started yet."""
    in_flight: int = 0
    """The most that it may have in flight now."""
    waiting: int = 0
    """Conversations that wait there; 0 while its last order may have changed that."""

    def take(self, report: GateReport) -> None:
        """Learn from its report, unless that was sent before the last order was there."""
        if self.order is not None and report.number >= self.order.number:
            self.in_flight, self.waiting = report.in_flight, report.waiting

    def give(self, share: int, generation: int, turns: int = 0) -> GateOrder:
        """A new order."""
        assert self.order is not None
        must_tell = turns > 0 or (share == 0 and self.order.share > 0)
        if must_tell:
            self.in_flight, self.waiting = max(self.in_flight + turns, self.order.share), 0
        self.order = GateOrder(share, generation, turns, self.order.number + must_tell)
        return self.order


class LimitKeeper:
    """The controller and the shares it hands out; lives where the runner does.

    Args:
        limit: The controller; None switches limiting off, and every gate keeps its full share.
        slots: Conversations of each worker, by its place: what the limit is shared by.
        changed: Told the limit, the refusals so far and what was said with the last, when one of the first has changed.
    """

    def __init__(
        self, limit: AdaptiveLimit | None, slots: dict[int, int], changed: Callable[[int, int, str], None]
    ) -> None:
        self._limit = limit
        self._slots = slots
        self._changed = changed
        self._places = {place: _Place(count) for place, count in slots.items()}
        self._by_turns = False
        self._queue: deque[int] = deque()
        """Places in which conversations wait for turns, in the order in which they get them."""

    def first_share(self, place: int) -> GateOrder:
        """What a worker starts with."""
        if self._limit is None:
            return GateOrder(self._slots[place], 0)
        known = self._places[place] = self._places.get(place) or _Place(self._slots[place])
        # Until it says otherwise it is taken to use all of it: guessed too low, a burst would show too small a limit.
        known.in_flight = self._shares(self._limit)[place]
        known.order = GateOrder(known.in_flight, self._limit.generation)
        return known.order

    def take(self, place: int, report: GateReport) -> dict[int, GateOrder]:
        """Learn from a worker's report; returns the new orders, by place, where they changed."""
        if self._limit is None:
            return {}
        before = (self._limit.limit, self._limit.refusals)
        self._places[place].take(report)
        if report.successes:
            self._limit.succeeded(report.successes)
        for generation in report.refused_generations:
            self._limit.refused(generation, sum(known.in_flight for known in self._places.values()))
        if (self._limit.limit, self._limit.refusals) != before:
            self._changed(self._limit.limit, self._limit.refusals, report.said)
        return self._new_orders(self._limit)

    def gone(self, place: int) -> dict[int, GateOrder]:
        """A worker has ended, and its part is for the others; returns their new orders."""
        self._places.pop(place, None)
        return {} if self._limit is None else self._new_orders(self._limit)

    def _new_orders(self, limit: AdaptiveLimit) -> dict[int, GateOrder]:
        shares = self._shares(limit)
        changed: dict[int, GateOrder] = {}
        for place, known in self._places.items():
            news = (shares[place], limit.generation)
            if known.order is not None and (known.order.share, known.order.generation) != news:
                changed[place] = known.give(*news)
        for place, turns in self._turns(limit, shares).items():
            changed[place] = self._places[place].give(0, limit.generation, turns)
        return changed

    def _shares(self, limit: AdaptiveLimit) -> dict[int, int]:
        """Each worker's part of the limit: one, and of the rest a part by its slots; 0 where there is not one each."""
        shares, before = {}, 0
        rest = limit.limit - len(self._places)
        total = max(1, sum(known.slots - 1 for known in self._places.values()))
        for place, known in sorted(self._places.items()):
            upto = before + known.slots - 1
            shares[place] = 1 + rest * upto // total - rest * before // total
            before = upto
        # From turns to shares only when none has more in flight than its share: together it would be above the limit.
        exceeds = any(known.in_flight > shares[place] for place, known in self._places.items())
        self._by_turns = rest < 0 or (self._by_turns and exceeds and rest < len(self._places))
        return dict.fromkeys(shares, 0) if self._by_turns else shares

    def _turns(self, limit: AdaptiveLimit, shares: dict[int, int]) -> dict[int, int]:
        """What is free of the limit, one by one, for those who wait and have no share of their own."""
        waiting = {place: known.waiting for place, known in self._places.items() if not shares[place] and known.waiting}
        self._queue = deque([place for place in self._queue if place in waiting])
        self._queue += [place for place in waiting if place not in self._queue]
        free = limit.limit - sum(known.in_flight for known in self._places.values())
        turns: dict[int, int] = {}
        while free > 0 and self._queue:
            place = self._queue.popleft()
            turns[place] = turns.get(place, 0) + 1
            free -= 1
            if turns[place] < waiting[place]:
                self._queue.append(place)
        return turns
