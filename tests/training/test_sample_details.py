"""Details that are stored with training samples: the tokens of a completion, and the states of a denoising chain."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import tiny_loop
import tiny_policies as tiny
from retouch.policies.decoding import AutoregressiveTrajectory
from retouch.recipe.keys import Samples
from retouch.records.folder import RunFolder
from retouch.records.trackers import CompositeTracker
from retouch.renderers.base import LatentRenderer
from retouch.run.recorder import Recorder, SampleDetails
from retouch.run.step import ScoredRollout, collect
from retouch.types import Completion, Kind, Prompts


@pytest.fixture
def collected() -> tuple[tiny.DenoisingPolicy, ScoredRollout]:
    policy = tiny.policy(mode="all")
    run, phase = tiny_loop.run(policy), tiny_loop.phase(count=2, group_size=2, steps=range(1))
    return policy, collect(run, phase, 0)


def stored(folder: RunFolder, made: ScoredRollout, details: SampleDetails | None) -> list[dict[str, object]]:
    folder.create()
    Recorder(folder, CompositeTracker([]), total=1, samples=Samples(groups=2), details=details).groups(1, made)
    return folder.read_samples(1)


def test_denoising_states_are_stored_for_the_first_sample_of_each_group(collected, tmp_path: Path) -> None:
    policy, made = collected
    folder = RunFolder(tmp_path / "run")
    lines = stored(folder, made, SampleDetails(policy.model, tokens=True, states=True))
    assert ["states" in line for line in lines] == [True, False, True, False]
    count = made.trajectory.latents.shape[1]
    assert [len(line["states"]) for line in lines if "states" in line] == [count, count]  # type: ignore[arg-type]
    assert all("tokens" not in line for line in lines)
    trajectory = made.trajectory.take(slice(2, 3))
    for place, name in enumerate(lines[2]["states"]):  # type: ignore[arg-type]
        state = replace(trajectory, outputs=trajectory.latents[:, place])
        (expected,) = LatentRenderer(policy.model)([made.batch.tasks[1]], state)
        assert expected is not None
        with Image.open(folder.samples(1) / name) as written:
            assert written.tobytes() == expected.tobytes()


def test_states_and_tokens_are_not_stored_unless_enabled(collected, tmp_path: Path) -> None:
    policy, made = collected
    plain = stored(RunFolder(tmp_path / "plain"), made, None)
    assert plain == stored(RunFolder(tmp_path / "off"), made, SampleDetails(policy.model, tokens=True, states=False))
    assert not {"states", "tokens"} & set(plain[0])


class Speller:
    """A model whose token ids are letters; it has only the method that the test needs."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + number) for number in ids)


def test_token_details_list_only_sampled_text_tokens_with_their_log_probabilities() -> None:
    text, image = Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN
    trajectory = AutoregressiveTrajectory(
        log_probs=torch.tensor([[-0.5, 0.0, -2.0, -9.0], [-1.0, -1.0, -1.0, -1.0]]),
        mask=torch.tensor([[True, False, True, False], [True, True, True, True]]),
        kind=torch.tensor([[text] * 4, [image] * 4]),
        outputs=(Completion((0, 1, 2), "abc", False), Completion((0, 1, 2, 3), "", False)),
        ids=torch.tensor([[0, 1, 2, 9], [0, 1, 2, 3]]),
        lengths=torch.tensor([3, 4]),
        vocabulary=torch.zeros(2, 4, dtype=torch.long),
        support=None,
        prompts=Prompts(
            torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool(), torch.zeros(1, 1, 1, dtype=torch.long), ({},)
        ),
        group=torch.tensor([0, 0]),
        behaviour_log_probs=None,
    )
    details = SampleDetails(Speller(), tokens=True, states=True)  # type: ignore[arg-type]
    assert details.tokens(trajectory, 0) == [("a", -0.5), ("c", -2.0)]  # the second was forced, and the last is padding
    assert details.tokens(trajectory, 1) is None
    assert SampleDetails(Speller(), tokens=False, states=True).tokens(trajectory, 0) is None  # type: ignore[arg-type]
