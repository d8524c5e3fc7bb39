"""The playground's autoencoder of image codes: k-means of its codes, and training, which is deterministic for a seed."""

import pytest
import torch

from retouch.core.random import generator
from retouch_worlds.pretraining import emu3 as image_codes
from retouch_worlds.pretraining.emu3 import (
    CodesTraining,
    decoded,
    encoded,
    exchanged,
    k_means,
    train_codes,
    untrained_codes,
)

SETTINGS = CodesTraining(steps=3, free_steps=2, batch=4)


def test_k_means_gives_rare_points_their_own_centre():
    random = generator(0, "points")
    places = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    counts = (200, 3, 2, 1)
    points = torch.cat([p + 0.01 * torch.randn(n, 2, generator=random) for p, n in zip(places, counts, strict=True)])
    found = k_means(points, 4)
    assert torch.cdist(places, found).min(1).values.max() < 0.05
    assert k_means(points[:5].repeat(3, 1), 8).isfinite().all()  # more centres than points


def test_chosen_cells_are_exchanged_between_images():
    pictures = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 24, 24)
    chosen = torch.zeros(2, 9, dtype=torch.bool)
    chosen[0, 4] = chosen[1, 0] = True
    mixed = exchanged(pictures, chosen)
    assert mixed[0, 0, 8:16, 8:16].unique().tolist() == [2.0]
    assert mixed[2, 0, 8:16, 8:16].unique().tolist() == [0.0]
    assert (mixed[0] == 2).sum() == (mixed[2] == 0).sum() == 3 * 64
    assert mixed[1, 0, :8, :8].unique().tolist() == [3.0]
    assert torch.equal(exchanged(mixed, chosen), pictures)


def test_encoded_and_decoded_match_the_methods_of_the_model():
    torch.manual_seed(0)
    vq = untrained_codes().eval()
    pictures = torch.rand(2, 3, 24, 24) * 2 - 1
    with torch.no_grad():
        codes = torch.stack(list(vq.encode(pictures, torch.tensor([[24, 24]] * 2), return_dict=True).image_tokens))
        latents = encoded(vq, pictures)
        nearest = torch.cdist(latents.permute(0, 2, 3, 1).reshape(-1, 8), vq.quantize.embedding.weight).argmin(1)
        assert torch.equal(nearest.view(2, 3, 3), codes)
        shown = decoded(vq, vq.quantize.embedding(codes).permute(0, 3, 1, 2))
        assert torch.allclose(shown, vq.decode(codes), atol=1e-5)


def test_training_is_deterministic_for_a_seed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="retouch")
    first, again = train_codes(SETTINGS), train_codes(SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert caplog.messages[0].startswith("codes step 0/3")
    assert not first.training
    torch.manual_seed(SETTINGS.seed)
    start = untrained_codes()
    assert not torch.equal(first.encoder.conv_in.weight, start.encoder.conv_in.weight)
    assert not torch.equal(first.quantize.embedding.weight, start.quantize.embedding.weight)
    assert len(first.quantize.embedding.weight) == image_codes.CODES
