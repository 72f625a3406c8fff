"""What the cache is worth in a real vLLM, beside vLLM's own connectors: `make bench-vllm`."""
