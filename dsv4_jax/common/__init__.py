"""Modules that any room may use: checks of arguments, sizes, reprs, headers of safetensors files, XLA's flags, axes."""
