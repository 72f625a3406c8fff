"""In place of torchvision, of which there is no build for the CPU's torch: images only."""

from __future__ import annotations

import enum
import importlib

from tests.sglang.standins.placeholders import stand_in_for

__version__ = "0.0"
__getattr__ = stand_in_for("torchvision")

io = importlib.import_module("torchvision.io")
ops = importlib.import_module("torchvision.ops")
transforms = importlib.import_module("torchvision.transforms")


class InterpolationMode(enum.Enum):
    """Whose members are looked at as modules are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


for _module in (transforms, importlib.import_module("torchvision.transforms.functional")):
    _module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
