"""The way to a coordinator: one request, its repetition, messages, bundles."""
