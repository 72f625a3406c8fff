"""What the storage backend for SGLang takes for pages, beside SGLang's own."""
