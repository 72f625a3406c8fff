"""Connectors: what ties an engine to the cache. Each imports its engine; nothing else of the core imports them."""
