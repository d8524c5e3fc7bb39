"""Runs a step of a denoising policy whose frozen parts are offloaded, in a separate process: see ``several_devices``.

    python placed_denoising.py RECIPE.json DEVICE OFFLOAD

Prints, as JSON, the results of the step, and the devices of the parts between and during their calls.
"""

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import nn

import image_levels
import several_devices
from retouch.distributed.ranks import Placement
from retouch.run import build as assembly
from retouch.run.step import collect

ROUNDS = 2


def main(path: str, name: str, offload: bool) -> dict[str, Any]:
    device = torch.device(name)
    with several_devices.SimulatedDevices():
        used: dict[str, list[str]] = defaultdict(list)
        own = assembly.encode_prompts

        def encode(*given: Any) -> None:
            _watch(given[-1].text.encoder, used["text encoder"])
            own(*given)

        assembly.encode_prompts = encode
        parts = several_devices.assembled(path, Placement(device, device, torch.device("cpu"), offload=offload))
        model: Any = parts.model
        while hasattr(model, "model"):
            model = model.model
        named = {"transformer": model.module, "text encoder": model.text.encoder, "autoencoder": model.latents.vae}
        for part, module in named.items():
            _watch(module, used[part])
        run, phase = parts.phase(0, stepper=parts.stepper(), judge=lambda batch, samples: parts.judge.submit(samples))
        calls = []
        for _ in range(ROUNDS):
            before = len(used["text encoder"])
            collected = collect(run, phase, 0)
            calls.append(len(used["text encoder"]) - before)
        found = {
            "images": image_levels.encode(collected.images),
            "loss": several_devices.loss_of(run, phase, collected),
            "calls": calls,
            "used": {part: sorted(set(places)) for part, places in used.items()},
            "waits": {part: sorted(several_devices.devices_of([*module.parameters()])) for part, module in named.items()},
        }
    parts.judge.close()
    return found


def _watch(module: nn.Module, places: list[str]) -> None:
    """Add the devices of the weights to ``places`` whenever the first leaf module of ``module`` computes."""
    leaf = next(each for each in module.modules() if not list(each.children()) and list(each.parameters()))
    leaf.register_forward_pre_hook(lambda each, _: places.extend(several_devices.devices_of([*each.parameters()])))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3] == "true")))
