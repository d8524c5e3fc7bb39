"""Copies of weights: swapped in and out bitwise, averaged (EMA), and with the adapter disabled as in PEFT."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tiny_policies as tiny
from retouch.policies.weights import WeightCopies, stale_copies
from retouch.recipe.policy import Ema
from retouch.run.build import Assembly


def linear():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    return module


def test_using_a_copy_restores_the_weights_bitwise_and_keeps_the_graph():
    policy, batch = tiny.policy(train="full"), tiny.batch()
    before = {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}
    storage = {name: parameter.data_ptr() for name, parameter in policy.module.named_parameters()}
    tiny.perturb(policy)
    moved = {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}
    trajectory = policy.rollout(batch)
    x, sigma, rows = trajectory.outputs, torch.full((4,), 0.5), slice(0, 4)
    parameters = list(tiny.trained(policy).values())
    alone = torch.autograd.grad(
        policy.velocity(trajectory, rows, x, sigma, "current").square().sum(), parameters, allow_unused=True
    )
    current = policy.velocity(trajectory, rows, x, sigma, "current")
    with policy.copies.using("reference"):
        for name, parameter in policy.module.named_parameters():
            assert torch.equal(parameter, before[name])
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(parameter, moved[name])
        assert parameter.data_ptr() == storage[name]
    # A graph that was built before a swap still gives the gradient of the current weights.
    after = torch.autograd.grad(current.square().sum(), parameters, allow_unused=True)
    for a, b in zip(alone, after, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_weights_are_restored_if_the_block_raises():
    module = linear()
    copies = WeightCopies(module)
    copies.snapshot("reference")
    with torch.no_grad():
        module.weight.add_(1)
    now = module.weight.detach().clone()

    def fail():
        with copies.using("reference"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(module.weight, now)


def test_a_copy_on_another_device_is_moved_only_for_its_block():
    copies = WeightCopies(linear(), devices={"reference": torch.device("meta")})
    for name in ("reference", "old"):
        copies.snapshot(name)
    assert {name: copy["weight"].device.type for name, copy in copies.copies.items()} == {"reference": "meta", "old": "cpu"}
    # A test of two devices that needs no GPU: the weights are on "meta", and the copy is on the CPU.
    module = linear().to("meta")
    copies = WeightCopies(module, devices={"reference": torch.device("cpu")})
    kept = linear().weight.detach()
    copies.copies["reference"] = {"weight": kept}
    here = module.weight.data
    with copies.using("reference"):
        assert module.weight.device.type == "meta"
        assert module.weight.data is not here
    assert module.weight.data.data_ptr() == here.data_ptr()
    assert copies.copies["reference"]["weight"] is kept


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.999, 1.0])
def test_update_ema_is_decay_times_the_copy_plus_the_rest_of_the_weights(decay):
    module = linear()
    copies = WeightCopies(module)
    copies.snapshot("average")
    old = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))
    now = module.weight.detach().clone()
    copies.update_ema("average", decay)
    torch.testing.assert_close(copies.copies["average"]["weight"], decay * old + (1 - decay) * now)
    assert torch.equal(module.weight, now)


@pytest.mark.parametrize("every", [1, 3])
def test_decay_of_the_average_grows_with_the_optimizer_steps_up_to_its_limit(every):
    module = linear()
    copies = WeightCopies(module)
    copies.snapshot("average")
    ema = Ema(decay=0.5, every=every)
    run = SimpleNamespace(recipe=SimpleNamespace(policy=SimpleNamespace(ema=ema)), copies=copies)
    wanted = module.weight.detach().clone()
    for taken in range(1, 13):
        with torch.no_grad():
            module.weight.add_(taken)
        Assembly._average(run, taken)
        if taken % every == 0:
            share = {1: 2 / 11, 2: 3 / 12, 3: 4 / 13, 4: 5 / 14, 5: 6 / 15, 6: 7 / 16, 7: 8 / 17}.get(taken, 0.5)
            wanted = share * wanted + (1 - share) * module.weight.detach()
        torch.testing.assert_close(copies.copies["average"]["weight"], wanted)


@pytest.mark.parametrize("family", ["sd3", "edit"])
def test_the_reference_of_a_lora_is_the_model_without_it(family):
    policy, batch = tiny.policy(family), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    x, sigma, rows = trajectory.outputs, torch.full((4,), 0.5), slice(0, 4)
    with torch.no_grad():
        current = policy.velocity(trajectory, rows, x, sigma, "current")
        reference = policy.velocity(trajectory, rows, x, sigma, "reference")
        policy.module.disable_adapters()
        plain = policy.model.velocity(policy.module, x, sigma, trajectory.conditioning.take(trajectory.group))
    assert torch.equal(reference, plain)
    assert (current - plain).abs().max() > 1e-3


def test_snapshot_without_adapter_raises_if_other_weights_are_trainable():
    policy = tiny.policy(copies=())
    policy.module.proj_out.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"proj_out.weight trains too but is not a LoRA matrix"):
        WeightCopies(policy.module).snapshot_without_adapter("reference")


def test_loading_a_saved_state_restores_the_copies():
    module = linear()
    copies = WeightCopies(module)
    for name in ("old", "average"):
        copies.snapshot(name)
        with torch.no_grad():
            module.weight.add_(1)
    state = {name: tensor.clone() for name, tensor in copies.state().items()}
    copies.update_ema("old", 0.5)
    copies.load(state)
    assert state.keys() == {"old/weight", "average/weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in copies.state().items())
    with pytest.raises(ValueError, match="differ from this run's"):
        copies.load({"old/weight": state["old/weight"]})


def test_ema_of_bf16_weights_accumulates_changes_smaller_than_rounding():
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    copies = WeightCopies(module)
    copies.snapshot("average")
    with torch.no_grad():
        module.weight.fill_(1.5)
    for _ in range(100):
        copies.update_ema("average", 0.999)
    with copies.using("average"):
        assert module.weight.dtype == torch.bfloat16
        assert module.weight[0, 0].item() == pytest.approx(1.5 - 0.5 * 0.999**100, abs=2**-8)
    assert module.weight[0, 0] == 1.5


def test_copies_for_stale_rollouts_keep_the_dtype_and_bits_of_the_weights():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    copies = WeightCopies(module)
    for name in (*stale_copies(2), "reference", "old"):
        copies.snapshot(name)
    types = {name: copy["weight"].dtype for name, copy in copies.copies.items()}
    assert types == {**dict.fromkeys(("sampling-0", "sampling-1", "reference"), torch.bfloat16), "old": torch.float32}
    kept = module.weight.detach().clone()
    # A checkpoint may hold the same numbers in fp32.
    state = {name: tensor.float() for name, tensor in copies.state().items()}
    with torch.no_grad():
        module.weight.mul_(3)
    copies.snapshot("sampling-1")
    copies.load(state)
    with copies.using("sampling-1"):
        assert torch.equal(module.weight, kept)
