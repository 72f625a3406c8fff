"""Which of SGLang's server arguments tell one KV from another, besides the files of the checkpoint and of its adapters.

An argument counts if the numbers of the KV mean something else with it: other weights, other precision, another
configuration of the model, pieces of the prompt that are left out or added. How the same is computed (kernels,
parallelism, batching) is none. An argument that counts without need costs misses, one that is left out wrong KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from lmcache_core.connectors.weights import file_digest

__all__ = ["FILES", "NUMBERS", "changed", "counted", "weights_elsewhere"]

NUMBERS = (
    # the model, its weights and their precision
    "context_length",
    "dtype",
    "is_embedding",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "model_config_parser",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "quantization",
    "quantize_and_serve",
    "debug_tensor_dump_input_file",
    "forward_hooks",
    # experts on CPUs, in a precision of their own
    "kt_max_deferred_experts_per_token",
    "kt_method",
    "kt_num_gpu_experts",
    "kt_weight_path",
    # the precision of what is computed with
    "deepep_dispatcher_output_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_a2a_dispatch_type",
    "flashinfer_mxfp4_moe_precision",
    "mamba_cache_philox_rounds",
    "mamba_ssm_dtype",
    "prefill_kv_cache_dequant_dtype",
    "rl_on_policy_target",
    # what is attended to
    "dllm_algorithm",
    "enable_decoder_swa_bounded_replay",
    "enable_deepseek_v4_fp4_indexer",
    "enable_encoder_swa_bounded_replay",
    "enable_hisparse",
    "enable_int8_mamba_checkpoint",
    "enable_mis",
    "hisparse_config",
    "qsa_indexer_dtype",
    # adapters
    "enable_lora",
    "experts_shared_outer_loras",
    "lora_target_modules",
    # what images become
    "disable_fast_image_processor",
    "enable_precise_embedding_interpolation",
    "image_processor_backend",
    "mm_process_config",
)
FILES = ("decrypted_config_file", "dllm_algorithm_config", "quantization_param_path", "rl_quant_profile")
"""Paths of files that count by what is in them."""
PLAIN = (None, False, 0, "", "{}", "auto", "default")
"""What an argument is that nobody has set."""
ELSEWHERE = {
    "load_format": ("private", "remote", "remote_instance"),
    "weight_cache_mode": ("client",),
}
"""Arguments by which weights come from somewhere else than the files of the checkpoint, where nothing can be read."""
ADDED = ("kt_weight_path", "modelopt_checkpoint_restore_path")
"""Paths of weights besides the checkpoint's, in formats of their own."""
QLORA = "qlora_adapter_name_or_path"
"""What names such a path in `model_loader_extra_config`."""


def counted(arguments: Any) -> dict[str, str]:
    """The arguments that count, as text that is the same for the same ones.

    Raises:
        LayoutError: A file that one names cannot be read.
    """
    fields = {name: _text(getattr(arguments, name, None)) for name in NUMBERS}
    for name in FILES:
        path = getattr(arguments, name, None)
        fields[name] = file_digest(str(path), _option(name)) if path else ""
    return fields


def changed(arguments: Any, names: Iterable[str]) -> Iterator[str]:
    """Those of these arguments that somebody has set, as they are written."""
    for name in names:
        value = getattr(arguments, name, None)
        if value and value not in PLAIN:
            yield f"{_option(name)} {_text(value)}"


def weights_elsewhere(arguments: Any) -> str:
    """The argument by which the weights are not those of the checkpoint's files alone; empty if there is none."""
    for name, values in ELSEWHERE.items():
        if getattr(arguments, name, None) in values:
            return f"{_option(name)} {getattr(arguments, name)}"
    if QLORA in _text(getattr(arguments, "model_loader_extra_config", None)):
        return f"{QLORA} in --model-loader-extra-config"
    return next(changed(arguments, ADDED), "")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    """Sets and mappings in an order that is the same in each process."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, sort_keys=True, default=str)
    return str(value)
