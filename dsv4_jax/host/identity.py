"""The properties that two caches must share to exchange the bytes of a request."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from dsv4_jax.cache import CacheSchema


def identity(schema: CacheSchema, key: str) -> dict[str, str]:
    """Returns everything that decides a request's bytes, as {name: value}.

    The numbers of blocks and slots and the context length do not matter. `key` names the weights.
    """
    return {
        "key": key,
        "config": hashlib.sha256(repr(dataclasses.asdict(schema.config)).encode()).hexdigest(),
        "kv_format": repr(schema.kv_format),
        "dtype": schema.dtype.name,
        "block_tokens": str(schema.block_tokens),
    }


def fingerprint(schema: CacheSchema, key: str) -> bytes:
    """Returns a 16-byte hash of `identity`."""
    text = json.dumps(identity(schema, key), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def check_identity(schema: CacheSchema, key: str, have: Mapping[str, str]) -> None:
    """Raises ValueError unless the identity `have` of a request equals that of this cache."""
    for name, want in identity(schema, key).items():
        if have.get(name) != want:
            raise ValueError(f"the request was made with {name}={have.get(name)!r}, this cache has {name}={want!r}")
