"""Modules that all other packages may use: checks of arguments, sizes, reprs, safetensors headers, XLA flags, axes."""
