"""Quotas, and the queue before a judge: limits of a minute, counts shared by processes, budgets, and the order of arrival."""

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retouch.rewards.base import BudgetSpent
from retouch_judge.quota import ProgressSemaphore, Quota, Turns


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def most_in_a_minute(begun):
    """The largest sum of units in any 60 seconds."""
    return max(sum(units for time, units in begun if start <= time < start + 60) for start, _ in begun)


units = st.floats(0.5, 40.0)
steps = st.lists(st.tuples(st.floats(0.0, 30.0), units, st.floats(0.0, 1.0), st.floats(0.0, 90.0)), min_size=1, max_size=120)


@given(steps=steps)
@example(steps=[(0.0, 40.0, 0.1, 20.0)] * 60 + [(0.5, 40.0, 1.0, 0.0)] * 60)  # slow replies with low use, then quick ones with high
def test_no_minute_exceeds_the_limits_for_any_sequence_of_requests(steps):
    """Each step: seconds that pass, units wanted, the share of the largest that it took, and when that is known."""
    clock = Clock()
    quota = Quota(requests_per_minute=10, units_per_minute=100, largest=40, clock=clock)
    requests: list[tuple[float, float]] = []
    taken: list[tuple[float, float]] = []
    open_: list[tuple[float, object, float]] = []
    for passed, _, share, reply in steps:
        clock.now += passed
        while (turn := quota.turn(40.0)).wait:
            due = [each for each in open_ if each[0] <= clock.now + turn.wait]
            for each in due:
                clock.now = max(clock.now, each[0])
                quota.settle(each[1], used=each[2], cost=0.0)
                open_.remove(each)
            clock.now += 0.0 if due else turn.wait
        requests.append((turn.now, 1.0))
        taken.append((turn.now, 40.0 * share))
        open_.append((clock.now + reply, turn, 40.0 * share))
    assert most_in_a_minute(requests) <= 10
    assert most_in_a_minute(taken) <= 100 + 1e-6


@pytest.mark.parametrize(("per_minute", "largest", "used"), [(7, 1, 1), (90_000, 3000, 1000), (200_000, 3000, 2999)])
def test_at_least_90_percent_of_the_rate_is_used_under_load(per_minute, largest, used):
    """Requests are always waiting, replies take two seconds, and a request that has to wait returns slightly late."""
    clock, begun, open_ = Clock(), [], []
    quota = Quota(units_per_minute=per_minute, largest=largest, clock=clock)
    while clock.now < 1000 + 600:
        turn = quota.turn(largest)
        if turn.wait:
            clock.now += min(turn.wait + 0.02, open_[0][0] - clock.now + 1e-6 if open_ else math.inf)
        else:
            begun.append((turn.now, used))
            open_.append((turn.now + 2, turn))
        while open_ and open_[0][0] <= clock.now:
            quota.settle(open_.pop(0)[1], used=used, cost=0.0)
    assert most_in_a_minute(begun) <= per_minute
    assert sum(units for _, units in begun) >= 0.9 * 10 * per_minute


@pytest.mark.parametrize("uptime", [1e6, 400.0])
def test_stored_times_from_before_a_reboot_are_ignored(tmp_path, uptime):
    clock = Clock()
    clock.now = uptime
    assert not Quota(requests_per_minute=1, file=tmp_path / "quota", clock=clock).turn(1.0).wait
    clock.now = 10.0
    again = Quota(requests_per_minute=1, file=tmp_path / "quota", clock=clock)
    assert not again.turn(1.0).wait
    assert again.turn(1.0).wait == pytest.approx(62.5 - 1)


def test_calls_are_claimed_all_or_none_until_the_budget_of_calls_or_cost_is_spent():
    quota = Quota(calls=10)
    quota.claim(7)
    with pytest.raises(BudgetSpent, match=r"10 calls .* 7 were made, 4 more are needed; raise its `calls`"):
        quota.claim(4)
    quota.claim(2)
    assert quota.claim_another()
    assert not quota.claim_another()
    assert quota.spent() == (10, 0.0)
    quota = Quota(cost=1.0)
    for _ in range(2):
        quota.claim(100)
        quota.settle(quota.turn(1.0), used=1.0, cost=0.6)
    with pytest.raises(BudgetSpent, match=r"the budget of 1 .* is spent \(1\.20\); raise its `cost`"):
        quota.claim(1)


@pytest.mark.parametrize(("calls", "world", "here"), [(29, 29, 1), (10, 8, 1), (100, 7, 1), (3, 8, 4), (29, 100, 10), (11, 12, 4)])
def test_the_calls_of_all_ranks_add_up_to_the_budget(calls, world, here, tmp_path, monkeypatch):
    """``here``: the ranks of a machine, which share a file; with 1, each rank has its own part."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    made = []
    for first in range(0, world, here):
        monkeypatch.setenv("RANK", str(first + here - 1))
        monkeypatch.setenv("LOCAL_RANK", str(here - 1))
        quota = Quota(calls=calls, file=None if here == 1 else tmp_path / f"quota-{first}")
        while quota.claim_another():
            pass
        made.append(quota.spent()[0])
    assert sum(made) == calls
    assert max(made) - min(made) <= 1


WORK = """
import sys
from pathlib import Path
from retouch_judge.quota import Quota
quota = Quota(requests_per_minute=6000, calls=1000, file=Path(sys.argv[1]), clock=lambda: 100.0)
print(sum(quota.claim_another() for _ in range(400)), sum(not quota.turn(1.0).wait for _ in range(200)))
"""


def test_processes_that_name_one_file_have_one_quota(tmp_path):
    """1000 calls in total, and at one moment as many turns as one process alone gets: those that catch up on a second."""
    command = [sys.executable, "-c", WORK, str(tmp_path / "quota")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate()[0].split() for process in processes]
    assert sum(int(calls) for calls, _ in told) == 1000
    alone = Quota(requests_per_minute=6000, clock=lambda: 100.0)
    assert sum(int(turns) for _, turns in told) == sum(not alone.turn(1.0).wait for _ in range(200)) < 100


def test_ranks_and_machines_get_equal_shares_of_the_quota(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    together, alone = Quota(calls=160, file=tmp_path / "quota"), Quota(calls=160)
    together.claim(80)
    assert not together.claim_another()
    alone.claim(10)
    assert not alone.claim_another()
    for keys, says in (
        ({"requests_per_minute": 8.0}, r"one request takes 1, but only 0\.5 are allowed per minute"),
        ({"calls": 3}, "calls is 3, but 16 ranks divide it; give at least 16, or a file"),
        ({"calls": 1, "file": tmp_path / "other"}, "calls is 1, but 2 machines divide it; give at least 2"),
    ):
        with pytest.raises(ValueError, match=says):
            Quota(**keys)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"requests_per_minute": 0.0}, "requests_per_minute is 0.0"),
        ({"units_per_minute": math.inf}, "units_per_minute is inf"),
        ({"calls": 0}, "calls is 0"),
        ({"cost": -1.0}, "cost is -1.0"),
        ({"units_per_minute": 100.0, "largest": 200.0}, "takes 200, but only 100 are"),
        ({"requests_per_minute": 0.5}, "takes 1, but only 0.5 are"),
        ({"calls": 1, "file": "notes"}, "notes is not a quota file"),
    ],
)
def test_limits_that_make_no_sense_and_foreign_files_are_refused(limits, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("not a quota")
    with pytest.raises(ValueError, match=says):
        Quota(**{key: Path(value) if key == "file" else value for key, value in limits.items()})


def test_places_are_given_in_order_of_arrival():
    """The deadline of a place counts from the start of waiting, and a cancelled request releases its place."""
    inside: list[int] = []

    async def one(line, number):
        assert await line.enter(since=1000.0) == 1005.0
        inside.append(number)

    async def act():
        clock = Clock()
        line = ProgressSemaphore(2, patience=5.0, clock=clock)
        waiting = [asyncio.create_task(one(line, number)) for number in range(6)]
        for seen in (2, 3, 4, 5):
            while len(inside) < seen:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert inside == list(range(seen))
            clock.now += 1.0
            if seen < 5:
                line.leave()
        line.leave()  # the last is admitted
        waiting[-1].cancel()  # and cancelled at the same moment
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(line.enter(since=1000.0), timeout=60)

        turns = Turns(Quota(requests_per_minute=1, clock=clock))
        assert [await turns.next(1.0, latest=clock.now + 30) is not None for _ in range(3)] == [True, False, False]

    asyncio.run(act())


def test_waiting_requests_time_out_only_if_no_request_is_answered():
    """As long as requests are answered, the others wait; if none is answered for too long, all of them time out together."""
    clock = Clock()

    async def act():
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
