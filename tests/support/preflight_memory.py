"""Runs the trial step of a run on a simulated device, in a separate process: see ``several_devices``.

    python preflight_memory.py RECIPE.json

Prints, as JSON: the bytes on the device before the preflight and when its trial step starts, the size of the trained weights, the
checks, and whether weights, weight copies and optimizer state are restored exactly.
"""

import gc
import json
import sys
from typing import Any

import torch

import several_devices
from retouch.distributed.ranks import Placement
from retouch.run import preflight

DEVICE = torch.device("pretend:0")


def bytes_on_device() -> int:
    gc.collect()
    placed = [value for value in gc.get_objects() if isinstance(value, several_devices.SimulatedTensor)]
    storages = {tensor.inner.untyped_storage().data_ptr(): tensor.inner.untyped_storage().nbytes() for tensor in placed}
    return sum(storages.values())


def main(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with several_devices.SimulatedDevices():
        parts = several_devices.assembled(path, Placement(DEVICE, DEVICE, torch.device("cpu"), offload=False))
        stepper = parts.stepper()
        step_with_ones(stepper)
        saved = {
            group: {k: v.cpu().clone() for k, v in tensors.items()}
            for group, tensors in parts.capture(stepper, step=1).tensors.items()
        }
        real = preflight._trial_minibatch

        def noted(*arguments: Any) -> Any:
            found["during"] = bytes_on_device()
            return real(*arguments)

        preflight._trial_minibatch = noted
        found["before"] = bytes_on_device()
        found["trained"] = sum(p.numel() * p.element_size() for p in parts.copies.parameters.values())
        found["checks"] = {check.name: check.ok for check in parts.trial_steps(stepper=stepper, judge=None, done=0)}
        now = parts.capture(stepper, step=1)
        found["restored"] = all(
            torch.equal(tensor.cpu(), saved[group][name])
            for group in ("weights", "optimizer", "copies")
            for name, tensor in now.tensors[group].items()
        )
        # A checkpoint is read into CPU memory, but the next step needs the moments on the device.
        resumed = parts.stepper()
        parts.restore(type(now)(1, saved, {}), resumed)
        moments = [tensor for name, tensor in resumed.state().items() if not name.endswith("/step")]
        found["moments_on"] = sorted(several_devices.devices_of(moments))
        step_with_ones(stepper)
        step_with_ones(resumed)
    parts.judge.close()
    return found


def step_with_ones(stepper: Any) -> None:
    for parameter in stepper.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    stepper.step(1e-3)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])))
