"""DeepSeek-V4's KV cache and sparse-attention decode for JAX.

`__init__.pyi` lists the public names. Subpackages: config, quant (byte formats), ops, cache, nn (the model), parallel,
checkpoint, host (slots and blocks), decode, engine (many requests), serve, bench, cli, and common for what they share.
A name is imported on first use, so `import dsv4_jax` alone does not import JAX.
"""

import lazy_loader


__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
