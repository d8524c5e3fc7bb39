"""The description of a published model, part by part: ``{"transformer": {"class": ..., "config": ...}, "vae": ..., ...}``.

It comes from the model's folder or from a packaged configuration, so that a step can be rehearsed before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Size: TypeAlias = tuple[int, int]
"""(height, width) in px."""
Part: TypeAlias = Mapping[str, Any]
"""A part of a model: its "class" and its "config"."""
PartConfigs: TypeAlias = Mapping[str, Part]
"""The described parts of a model by name."""

MEGAPIXEL = (1024, 1024)
