"""What must agree for the bytes of one cache to mean the same in another."""

import hashlib
import json

from dsv4_jax.cache import CacheSchema


def identity(schema: CacheSchema, key: str) -> dict[str, str]:
    """Names and values of what decides a request's bytes.

    Args:
      schema: geometry of the cache; sizes that requests do not depend on (blocks, slots, context) are left out.
      key: names the weights: no geometry can tell two models of one shape apart.
    """
    return {
        "key": key,
        "config": hashlib.sha256(repr(schema.config).encode()).hexdigest(),
        "kv_format": repr(schema.kv_format),
        "dtype": schema.dtype.name,
        "block_tokens": str(schema.block_tokens),
    }


def fingerprint(schema: CacheSchema, key: str) -> bytes:
    """16 bytes that differ where `identity` does."""
    text = json.dumps(identity(schema, key), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
