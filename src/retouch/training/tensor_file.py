"""Writes a safetensors file one tensor at a time. The header is written first: it needs only dtypes and shapes, no values."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from retouch.distributed.gathering import forms, in_file_order
from retouch.records import files

_TYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as a safetensors file. Views, and tensors that share storage, are written as separate full tensors.

    Each tensor is read once and released before the next is read, so CPU memory is needed for one tensor at a time.
    """
    header, end = {}, 0
    found, names = forms(tensors), in_file_order(tensors)
    for name in names:
        dtype, shape = found[name]
        begin, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % _ALIGNMENT)
    with files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        file.write(struct.pack("<Q", len(described)))
        file.write(described)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
