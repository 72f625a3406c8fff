"""Moving KV between an engine's memory and the host pool."""
