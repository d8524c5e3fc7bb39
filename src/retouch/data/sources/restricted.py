"""Files that torch saved, read by its restricted loader and by nothing else: numbers, texts, tensors and plain numpy arrays.

Safetensors is what this package writes; this is for files of others that hold features and whose owner is trusted.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray

_TYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_PLAIN = [type(np.dtype(name)) for name in _TYPES]
# The same function under the names that numpy 2 and numpy 1 saved it by.
_ARRAYS = [(multiarray._reconstruct, f"numpy.{where}.multiarray._reconstruct") for where in ("_core", "core")]  # type: ignore[attr-defined]

_FORBIDDEN = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]


def load_restricted(path: Path) -> Any:
    """What the file holds. ValueError for anything but plain values, and for a file that torch did not save."""
    with torch.serialization.safe_globals([*_ARRAYS, *_PLAIN, np.ndarray, np.dtype]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except _FORBIDDEN:
            raise ValueError(f"{path}: holds more than numbers, texts and arrays, and is not opened") from None
        except (RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
            raise ValueError(f"{path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return f"not a file that torch saved ({str(error).splitlines()[0]:.80})" if str(error) else "not a file that torch saved"
