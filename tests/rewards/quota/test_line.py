"""The queue before a judge: places are given in order of arrival; waiting times out when no request is answered any more."""

import asyncio

import pytest

from retouch_judge.quota import ProgressSemaphore


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_places_are_given_in_order_of_arrival() -> None:
    inside: list[int] = []

    async def one(line: ProgressSemaphore, number: int) -> None:
        assert await line.enter(since=100.0) == 105.0
        inside.append(number)

    async def act() -> None:
        line = ProgressSemaphore(2, patience=5.0, clock=Clock())
        waiting = [asyncio.create_task(one(line, number)) for number in range(5)]
        for seen in (2, 3, 4, 5):
            while len(inside) < seen:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert inside == list(range(seen))
            line.leave()
        await asyncio.gather(*waiting)

    asyncio.run(act())


def test_waiting_requests_time_out_only_if_no_request_is_answered() -> None:
    """As long as requests are answered, the others wait; if none is answered for too long, all of them time out together."""
    clock = Clock()

    async def act() -> None:
        line = ProgressSemaphore(1, patience=0.02, clock=clock)
        await line.enter(since=clock())
        waiting = [asyncio.create_task(line.enter(since=clock())) for _ in range(3)]
        for _ in range(10):
            clock.now += 0.015
            line.answered()
            await asyncio.sleep(0.03)  # longer than the patience, but in real time, which does not count
        assert not any(task.done() for task in waiting)
        clock.now += 0.021
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimeoutError] * 3
        line.leave()
        assert await line.enter(since=clock()) == pytest.approx(clock.now + 0.02)  # no place was lost

    asyncio.run(act())


def test_the_deadline_of_a_place_counts_from_the_start_of_waiting() -> None:
    clock = Clock()

    async def act() -> float:
        line = ProgressSemaphore(1, patience=10.0, clock=clock)
        await line.enter(since=100.0)
        waiting = asyncio.create_task(line.enter(since=100.0))
        await asyncio.sleep(0.01)
        clock.now = 109.0
        line.leave()
        return await waiting

    assert asyncio.run(act()) == 110.0


def test_a_cancelled_request_releases_its_place() -> None:
    async def act() -> None:
        line = ProgressSemaphore(1, patience=100.0, clock=Clock())
        await line.enter(since=100.0)
        gone = asyncio.create_task(line.enter(since=100.0))
        await asyncio.sleep(0.01)
        line.leave()  # it is admitted
        gone.cancel()  # and cancelled at the same moment
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.wait_for(line.enter(since=100.0), timeout=60)

    asyncio.run(act())
