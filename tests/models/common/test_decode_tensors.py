"""Images as tensors with gradient: they are the images that ``decode`` makes, before they are rounded to 8 bits."""

import numpy as np
import pytest
import torch

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.models.pipeline import Guided
from retouch.protocols import DecodesTensors
from retouch_worlds.models.family import PlaygroundModel


def playground():
    return PlaygroundModel().build(device=torch.device("cpu"))


MODELS = {**tiny.MODELS, "playground": playground}


def latents(model):
    conditioning = model.encode(tiny.tasks(2))
    return 0.5 * model.initial_noise(conditioning.take(torch.tensor([0, 1])), [generator("x", k) for k in range(2)]), conditioning


@pytest.mark.parametrize("family", MODELS)
def test_decode_tensors_matches_decode_before_rounding(family):
    model = MODELS[family]()
    assert isinstance(model, DecodesTensors)
    x, conditioning = latents(model)
    with torch.no_grad():
        found = model.decode_tensors(x, conditioning)
    images = [torch.from_numpy(np.array(image)).movedim(-1, 0) for image in model.decode(x, conditioning)]
    assert (found * 255 - torch.stack(images)).abs().max() <= 0.5 + 1e-3
    assert torch.equal(Guided(model, 2.0).decode_tensors(x, conditioning).detach(), found)


@pytest.mark.parametrize("family", MODELS)
def test_decode_tensors_has_gradients_for_latents_but_not_for_the_autoencoder(family):
    model = MODELS[family]()
    x, conditioning = latents(model)
    x.requires_grad_()
    model.decode_tensors(x, conditioning).square().mean().backward()
    assert x.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.latents.vae.parameters())


def test_checkpointed_decode_saves_fewer_bytes_and_gives_the_same_gradient():
    """``policy.gradient_checkpointing`` recomputes the decoder's activations too, if the autoencoder can."""
    found = []
    for on in (False, True):
        model, kept = MODELS["sd3"](), []
        if on:
            model.module.enable_gradient_checkpointing()
        x, conditioning = latents(model)
        x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor, lambda t: t):
            images = model.decode_tensors(x, conditioning)
        (slope,) = torch.autograd.grad(images.square().mean(), x)
        found.append((slope, sum(kept)))
        model.latents.vae.disable_gradient_checkpointing()
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1] < found[0][1]
