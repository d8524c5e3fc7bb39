"""Guidance around a model: both branches in one forward, combined as the model's own pipeline does it."""

import pytest
import torch

import tiny_policies as tiny
from retouch.models.pipeline import Guided
from retouch.protocols import DenoisingModel


@pytest.mark.parametrize("family", ["sd3", "edit"])
def test_guided_velocity_is_the_combination_of_both_branches(family):
    model = tiny.MODELS[family]()
    guided = Guided(model, 3.5)
    assert isinstance(guided, DenoisingModel)
    tasks = tiny.tasks(3)
    conditioning = guided.encode(tasks).take(torch.tensor([2, 0, 1, 2]))
    x = guided.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(4)])
    sigma = torch.tensor([0.9, 0.6, 0.5, 0.1])
    order = torch.tensor([2, 0, 1, 2])
    positive = model.velocity(model.module, x, sigma, model.encode(tasks).take(order))
    negative = model.velocity(model.module, x, sigma, model.encode_negative(tasks).take(order))
    found = guided.velocity(guided.module, x, sigma, conditioning)
    torch.testing.assert_close(found, model.combine(positive, negative, 3.5), atol=1e-5, rtol=1e-4)
    assert (found - positive).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branches_of_unequal_length_run_without_a_mask_in_bfloat16(dtype):
    """With a mask, attention in 16 bits cannot use the flash kernel. Rows of one task have texts of the same length."""
    model = tiny.edit_model()
    model.module.to(dtype)
    masks = []
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["encoder_hidden_states_mask"] is not None), with_kwargs=True
    )
    guided = Guided(model, 3.5)
    tasks = tiny.tasks(4)[3:]
    conditioning = guided.encode(tasks).take(torch.tensor([0, 0]))
    assert conditioning.tensors["embeds"].shape[1] != conditioning.negative.tensors["embeds"].shape[1]
    x = guided.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(2)])
    found = guided.velocity(guided.module, x, torch.tensor([0.9, 0.4]), conditioning)
    assert masks == ([True] if dtype == torch.float32 else [False, False])
    branches = [
        model.velocity(model.module, x, torch.tensor([0.9, 0.4]), encode(tasks).take(torch.tensor([0, 0])))
        for encode in (model.encode, model.encode_negative)
    ]
    torch.testing.assert_close(found, model.combine(*branches, 3.5), atol=1e-5, rtol=1e-4)


def test_both_branches_have_gradient():
    policy = tiny.policy("sd3", guidance=3.0, train="full")
    conditioning = policy.model.encode(tiny.tasks())
    x, sigma = policy.model.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(2)]), torch.full((2,), 0.5)
    weight = policy.module.proj_out.bias
    (whole,) = torch.autograd.grad(policy.model.velocity(policy.module, x, sigma, conditioning).sum(), weight)
    inner = policy.model.model
    (positive,) = torch.autograd.grad(inner.velocity(policy.module, x, sigma, inner.encode(tiny.tasks())).sum(), weight)
    # The output bias has the same gradient in both branches: 3 times that of the positive minus 2 times that of the negative.
    torch.testing.assert_close(whole, positive, rtol=1e-4, atol=1e-5)
    assert whole.abs().min() > 0


@pytest.mark.parametrize("scale", [1.0, 0.0, -2.0])
def test_guidance_scale_of_at_most_1_raises(scale):
    with pytest.raises(ValueError, match="guidance needs a scale above 1"):
        Guided(tiny.sd3_model(), scale)
