"""Storage backends, each a plugin that loads by name on first use."""
