"""Runs a step of a writer whose parts are on different devices, in a separate process: see ``several_devices``.

    python placed_run.py RECIPE.json {"policy": "pretend:0", ...}

Prints, as JSON, the results of the step and the device of each part.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

import image_levels
import several_devices
from retouch.distributed.ranks import Placement
from retouch.models.offloading import parts_of
from retouch.rewards.pixels import ShareReward
from retouch.run.step import collect
from retouch.types import Sample, Scores


class RecordsDevice:
    """A reward that records the device that it was built for."""

    device: torch.device | None = None
    columns = ShareReward(channel="red").columns

    def __init__(self, device: torch.device) -> None:
        self.share = ShareReward(channel="red")
        RecordsDevice.device = device

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return self.share(samples)


def main(path: str, where: dict[str, Any]) -> dict[str, Any]:
    offload = where.pop("offload", False)
    placement = Placement(**{part: torch.device(name) for part, name in where.items()}, offload=offload)
    with several_devices.SimulatedDevices():
        parts = several_devices.assembled(path, placement)
        drawn_on: set[str] = set()
        transformer = parts.image_model.module
        transformer.register_forward_pre_hook(lambda module, _: drawn_on.update(several_devices.devices_of([*module.parameters()])))
        run, phase = parts.phase(0, stepper=parts.stepper(), judge=lambda batch, samples: parts.judge.submit(samples))
        collected = collect(run, phase, 0)
        loss = several_devices.loss_of(run, phase, collected)
        gradients = [p.grad for p in parts.model.module.parameters() if p.grad is not None]
        own = [part for part in parts_of(parts.image_model) if part is not parts.model.module]
        found = {
            "written": [output.ids for output in collected.trajectory.outputs],
            "encoded_images": image_levels.encode(collected.images),
            "loss": loss,
            "gradient": sum(float(gradient.cpu().double().square().sum()) for gradient in gradients),
            "policy": sorted(several_devices.devices_of([*parts.model.module.parameters()])),
            "renderer": sorted(several_devices.devices_of([tensor for part in own for tensor in part.parameters()])),
            "drawn_on": sorted(drawn_on),
            "reward": str(RecordsDevice.device),
            "gradients": sorted(several_devices.devices_of(gradients)),
        }
    parts.judge.close()
    return found


if __name__ == "__main__":
    import placed_run  # a recipe names the class ``RecordsDevice`` by this module, which must therefore be imported under its name

    sys.stdout.write(json.dumps(placed_run.main(sys.argv[1], json.loads(sys.argv[2]))))
