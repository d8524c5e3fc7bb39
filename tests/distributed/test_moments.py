"""AdamW with moments in 8 bits or in CPU memory: quantisation, its error, steps compared with torch's, and its saved state."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from retouch.distributed.optimizer import BLOCK, SMALLEST, ReplicatedStepper, StoredMomentsAdamW, dequantise, quantise
from retouch.distributed.ranks import Ranks
from warm_python import python


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(7,), (BLOCK,), (3, 1000)])
def test_quantisation_error_is_below_2_percent_of_the_block_maximum(signed: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[-1])
    x = x if signed else x.square()
    codes, scales = quantise(x, signed=signed)
    found = dequantise(codes, scales, x, signed=signed)
    assert (codes.dtype, found.shape, len(scales)) == (torch.uint8, x.shape, -(-x.numel() // BLOCK))
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    assert torch.equal(scales, blocks)
    whole = scales.repeat_interleave(BLOCK)[: x.numel()].view(shape)
    assert ((found - x).abs() / whole).max() < 0.02
    exact = dequantise(*quantise(torch.zeros(shape), signed=signed), x, signed=signed)
    assert torch.equal(exact, torch.zeros(shape))


def trained(optimizer: str, width: int, steps: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the weights of a linear regression of ``width`` columns after some steps."""
    random = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(64, width, generator=random), torch.randn(width, 70, generator=random)
    weight = nn.Parameter(torch.zeros(width, 70))
    settings = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    if optimizer == "fp32":
        made: torch.optim.Optimizer = torch.optim.AdamW([weight], **settings)
    else:
        made = StoredMomentsAdamW([weight], **settings, moments=optimizer, local=lambda tensor: tensor.detach())
    for _ in range(steps):
        loss = (inputs @ (weight - wanted)).square().mean()
        made.zero_grad()
        loss.backward()
        made.step()
    return loss.detach(), weight.detach()


def test_8bit_adamw_matches_torch_on_small_tensors() -> None:
    assert SMALLEST > 50 * 70
    (loss, weight), (known, same) = trained("8bit", 50), trained("fp32", 50)
    torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, known, rtol=1e-5, atol=0)


def test_8bit_adamw_stays_close_to_fp32_on_large_tensors() -> None:
    assert SMALLEST < 100 * 70
    (loss, weight), (known, exact) = trained("8bit", 100), trained("fp32", 100)
    assert loss.item() == pytest.approx(known.item(), rel=0.05)
    assert (weight - exact).norm() / exact.norm() < 0.1


def test_adamw_with_moments_in_cpu_memory_matches_torch() -> None:
    (loss, weight), (known, exact) = trained("cpu", 100), trained("fp32", 100)
    torch.testing.assert_close(weight, exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, known, rtol=1e-5, atol=0)


ON_A_DEVICE = """
import json, torch, several_devices
from torch import nn
from retouch.distributed.ranks import Ranks
from retouch.distributed.optimizer import ReplicatedStepper

def step(made):
    for parameter in made.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    made.step(1e-3)

device = torch.device("pretend:0")
with several_devices.SimulatedDevices():
    module = nn.Linear(8, 8).to(device)
    made, resumed = (ReplicatedStepper(module, Ranks(device=device), moments="cpu") for _ in range(2))
    step(made)
    step(made)
    resumed.load({name: tensor.cpu() for name, tensor in made.state().items()})
    step(resumed)
    print(json.dumps([sorted(several_devices.devices_of([*each.state().values()])) for each in (made, resumed)]))
"""


def test_moments_of_weights_on_a_device_are_in_cpu_memory() -> None:
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([python(), "-c", ON_A_DEVICE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["cpu"], ["cpu"]]


def stepper(seed: int, moments: str = "8bit") -> ReplicatedStepper:
    torch.manual_seed(seed)
    return ReplicatedStepper(nn.Linear(100, 80, dtype=torch.bfloat16), Ranks(), moments=moments)


def step(made: ReplicatedStepper, key: int) -> None:
    inputs = torch.randn(4, 100, generator=torch.Generator().manual_seed(key)).bfloat16()
    made.backward(made.module(inputs).float().square().mean())
    made.step(1e-2)


@pytest.mark.parametrize("moments", ["8bit", "cpu"])
def test_saved_optimizer_state_resumes_bitwise(moments: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    one, other = stepper(0, moments), stepper(1, moments)
    for key in range(3):
        step(one, key)
    state = {name: tensor.contiguous() for name, tensor in one.state().items()}
    assert ("weight/exp_avg_codes" in state) == (moments == "8bit")
    assert state["bias/exp_avg"].dtype == torch.float32
    save_file(state, tmp_path / "state.safetensors")
    other.module.load_state_dict(one.module.state_dict())
    other.load(load_file(tmp_path / "state.safetensors"))
    restore = other.snapshot()
    step(other, 9)
    restore()
    other.module.load_state_dict(one.module.state_dict())
    for made in (one, other):
        step(made, 3)
        step(made, 4)
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])
    for name, tensor in one.state().items():
        assert torch.equal(tensor, other.state()[name]), name
