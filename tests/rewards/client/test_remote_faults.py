"""Many kinds of faulty replies: the scores come from another server, or are missing; they are never wrong."""

from contextlib import closing

import pytest
import torch

from bad_server import ALL_FAULTS, HARMLESS, bad_server
from live_server import remote, samples_of
from served_rewards import digest_score

FINAL = {"404", "400", "401"}
DEADLINE = 60.0


def expected(samples: list[object]) -> torch.Tensor:
    return torch.tensor([digest_score(sample) for sample in samples], dtype=torch.float64)


@pytest.mark.parametrize("kind", [*ALL_FAULTS, *HARMLESS])
def test_scores_come_from_another_server_after_a_faulty_reply(kind: str) -> None:
    samples = samples_of(16)
    timeout = 1.0 if kind in ("hang", "slow drip") else 10.0
    with (
        bad_server(kind) as bad,
        bad_server("none") as good,
        closing(remote([bad.url, good.url], batch=4, attempts=20, timeout=timeout, deadline=DEADLINE)) as reward,
    ):
        scores = reward(samples)["digest"]
        assert bad.request_count > 0
        if kind in FINAL:  # not retried by design: the status says that the request itself is wrong
            assert torch.equal(scores[~scores.isnan()], expected(samples)[~scores.isnan()])
        else:
            torch.testing.assert_close(scores, expected(samples), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ALL_FAULTS)
def test_scores_are_missing_if_the_only_server_is_faulty(kind: str) -> None:
    samples = samples_of(6)
    timeout = 0.3 if kind in ("hang", "slow drip") else 10.0
    deadline = 1.0 if kind in ("429", "503") else DEADLINE  # these do not count as attempts, so only the deadline ends them
    with (
        bad_server(kind) as bad,
        closing(remote([bad.url], batch=3, attempts=2, timeout=timeout, deadline=deadline)) as reward,
    ):
        scores = reward(samples)
        assert ("faults/out_of_time" in reward.stats()) is (kind in ("429", "503"))
    missing = scores["digest"].isnan()
    torch.testing.assert_close(scores["digest"][~missing], expected(samples)[~missing], rtol=0, atol=0)
    assert missing.tolist() == [False, False, True] * 2 if kind == "an error of the reward" else missing.all()
    if kind in FINAL:
        assert bad.request_count == 2  # one for each request


def test_items_of_a_reply_may_be_in_any_order() -> None:
    samples = samples_of(7)
    with bad_server("another order") as server, closing(remote([server.url], batch=4)) as reward:
        torch.testing.assert_close(reward(samples)["digest"], expected(samples), rtol=0, atol=0)
        assert reward.stats() == {"calls": 2.0}
