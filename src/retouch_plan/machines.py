"""The machines for which a dry run models the time: a few rates of each GPU, from a table or from a measured profile.

A profile is a JSON file with fields of ``Machine``; missing fields have the values of the GPU that the profile names.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from retouch.records.files import read_json

_GIB = 2**30
TFLOPS = 10**12
FREE_SHARE = 0.1
"""The share of a device's memory that must stay free, for the CUDA context, workspaces of kernels and fragmentation."""
_PUBLISHED = "published rates, scaled to what kernels reach"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU's memory in bytes and its sustained rates.

    ``half``, ``single``: FLOP/s of matrix products in 16 bits, and in fp32 without TF32. ``attention``, ``masked_attention``:
    FLOP/s of FlashAttention, and of the memory-efficient kernel that takes a mask. ``bandwidth``: bytes/s that copies read and
    write. ``elementwise``: the share of it that elementwise kernels and reductions reach. ``convolution``: the share of ``half``
    that convolutions reach. ``launch``: seconds that the host needs to launch one kernel. ``gap``: seconds that a kernel of a CUDA
    graph adds to its own time. ``copy``, ``pinned_copy``: bytes/s between host and device, from pageable and page-locked memory.
    ``link``: bytes/s of each rank in a collective. ``measured``: the source of the numbers.
    """

    name: str
    memory: int
    half: float
    single: float
    attention: float
    masked_attention: float
    bandwidth: float
    elementwise: float = 0.55
    convolution: float = 0.19
    launch: float = 6e-6
    gap: float = 3.3e-6
    copy: float = 10e9
    pinned_copy: float = 50e9
    link: float = 300e9
    measured: str = _PUBLISHED

    def rate(self, kind: str, dtype: torch.dtype) -> float:
        """Return the FLOP/s of a kind of work: "matmul", "convolution", "attention" or "masked attention"."""
        if dtype.itemsize > 2:
            return self.single
        if kind in ("matmul", "convolution"):
            return self.half * (self.convolution if kind == "convolution" else 1.0)
        return self.attention if kind == "attention" else self.masked_attention


# Gaps: on an H100, a graph of one token of a writer with 7 B parameters took 11.5 ms. It has 1836 kernels; 5.7 ms are modelled for
# them, and with the gaps 11.7 ms.
#
# Convolutions: on an H100, decoding 9 images of 512 px with SD3's autoencoder took 0.182 s, of which 0.033 s are modelled for all
# other kernels, and 4 images of 1024 px with Qwen-Image's took 0.289 s, with 0.166 s for all others: 20 % and 18 % of the rate of
# matrix products.
#
# Elementwise kernels: on an H100, the kernels of SD3.5 Medium that are no matrix products and no attention took 122 ms of a forward
# pass of 193 ms, and would take 69 ms at the full bandwidth. This explains the measured time of whole steps: 1.4 times the modelled
# time at full bandwidth for SD3.5 Medium, and 1.2 times for Qwen-Image-Edit.
#
# H100 and H200: products of 8192 x 8192 matrices and device copies with PyTorch alone, measured on one GPU of each kind (788 to 798
# TFLOP/s in bf16, 3.0 and 4.3 TB/s); nothing of this package was involved. Other GPUs: 80 % of the published dense rate and 90 % of
# the published bandwidth. Attention: 60 % (without a mask) and 30 % (with a mask) of the rate of matrix products.
_H100 = Machine(
    name="h100",
    memory=int(79.1 * _GIB),
    half=790 * TFLOPS,
    single=50 * TFLOPS,
    attention=470 * TFLOPS,
    masked_attention=240 * TFLOPS,
    bandwidth=3.0e12,
    measured="16-bit matrix products and device copies measured on one GPU of this kind, the other rates estimated",
)
_A100 = replace(
    _H100,
    name="a100-80gb",
    half=250 * TFLOPS,
    single=15.5 * TFLOPS,
    attention=150 * TFLOPS,
    masked_attention=75 * TFLOPS,
    bandwidth=1.8e12,
    copy=8e9,
    pinned_copy=24e9,
    link=200e9,
    measured=_PUBLISHED,
)
_CONSUMER = replace(
    _A100,
    name="4090",
    memory=int(23.6 * _GIB),
    half=132 * TFLOPS,
    single=66 * TFLOPS,
    attention=79 * TFLOPS,
    masked_attention=40 * TFLOPS,
    bandwidth=0.9e12,
    link=20e9,
)
_L40S = replace(
    _CONSUMER,
    name="l40s",
    memory=int(44.4 * _GIB),
    half=290 * TFLOPS,
    single=73 * TFLOPS,
    attention=174 * TFLOPS,
    masked_attention=87 * TFLOPS,
    bandwidth=0.78e12,
)
_12GB = replace(
    _CONSUMER,
    name="12gb",
    memory=int(11.6 * _GIB),
    half=20.5 * TFLOPS,
    single=10.2 * TFLOPS,
    attention=12.3 * TFLOPS,
    masked_attention=6.1 * TFLOPS,
    bandwidth=0.32e12,
    measured=f"modelled: an RTX 3060 12GB, {_PUBLISHED}",
)
_16GB = replace(
    _12GB,
    name="16gb",
    memory=int(15.6 * _GIB),
    half=78 * TFLOPS,
    single=39 * TFLOPS,
    attention=47 * TFLOPS,
    masked_attention=23 * TFLOPS,
    bandwidth=0.65e12,
    measured=f"modelled: an RTX 4080, {_PUBLISHED}",
)
MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        replace(_H100, name="h200", memory=int(139.8 * _GIB), bandwidth=4.3e12),
        _H100,
        _A100,
        replace(_A100, name="a100-40gb", memory=int(39.4 * _GIB), bandwidth=1.4e12),
        _L40S,
        replace(
            _CONSUMER,
            name="5090",
            memory=int(31.4 * _GIB),
            half=168 * TFLOPS,
            single=84 * TFLOPS,
            attention=100 * TFLOPS,
            masked_attention=50 * TFLOPS,
            bandwidth=1.6e12,
            pinned_copy=50e9,
        ),
        _CONSUMER,
        _12GB,
        _16GB,
        replace(_CONSUMER, name="24gb", measured=f"modelled: an RTX 4090, {_PUBLISHED}"),
        replace(_L40S, name="48gb", measured=f"modelled: an L40S, {_PUBLISHED}"),
        replace(_H100, name="80gb", measured=f"modelled: an H100, {_H100.measured}"),
    )
}
"""The GPUs that are known by name."""
DEFAULT_GPU = "h100"
"""The GPU that is assumed if none is named."""


def fits(needed: int, memory: int) -> bool:
    """Whether ``needed`` bytes leave enough of the ``memory`` bytes of a device free."""
    return needed <= (1 - FREE_SHARE) * memory


def find_machine(name: str) -> Machine:
    """Return a machine by the name of its GPU or the path of a profile. Raises ValueError for another name or a wrong profile."""
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--device {name}: use one of {', '.join(MACHINES)}, or the JSON file of a measured profile")
    found = read_json(path)
    known = {field.name for field in fields(Machine)}
    if not isinstance(found, dict) or not found.keys() <= known or found.get("name") not in MACHINES:
        raise ValueError(f"{path}: a profile has a name ({', '.join(MACHINES)}) and any of {', '.join(sorted(known - {'name'}))}")
    base = {**asdict(MACHINES[found["name"]]), "measured": f"measured, {path.name}"}
    return Machine(**{**base, **found})
