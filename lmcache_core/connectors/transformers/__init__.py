"""Hugging Face transformers: `generate` that takes the KV of a known prefix from the cache and gives back what is new.

model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
with CachedModel.open(model, "cache.yaml") as cached:
    output = cached.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)
    print(cached.last_call)
"""

from lmcache_core.connectors.transformers.calls import CallStats
from lmcache_core.connectors.transformers.identity import describe_model
from lmcache_core.connectors.transformers.model import CachedModel

__all__ = ["CachedModel", "CallStats", "describe_model"]
