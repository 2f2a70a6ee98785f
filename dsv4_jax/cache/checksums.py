"""Checksums of cached bytes by layer, computed on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from dsv4_jax.cache.pools import KVCache
from dsv4_jax.cache.request_rows import RequestRows, local_blocks
from dsv4_jax.cache.schema import CacheSchema
from dsv4_jax.parallel.local_ids import all_reduce_bits
from dsv4_jax.parallel.sharded_step import sharded_read


@jax.jit
@sharded_read
def checksum_blocks(cache: KVCache, blocks: Int[Array, "n"]) -> UInt32[Array, "layers n"]:
    """Computes checksums of blocks, [layers of the model, n]; any changed byte changes them.

    Layers that store nothing in blocks have the checksum 0.

    Args:
      cache: the cache; only read.
      blocks: [n] block ids; the checksum of -1 is 0.
    """
    sums = jnp.zeros((len(cache.schema.layers), blocks.shape[0]), jnp.uint32)
    blocks = local_blocks(cache, blocks)
    for name, spec in cache.schema.groups.items():
        pools = cache.groups[name].paged
        rows = jax.tree.map(lambda x: x.at[:, jnp.maximum(blocks, 0)].get(mode="clip"), pools)
        sums = sums.at[jnp.array(spec.layers)].add(_fold(rows, 2))
    return all_reduce_bits(jnp.where((blocks >= 0)[None, :], sums, 0), cache.schema.block_axis)


def checksum_rows(schema: CacheSchema, rows: RequestRows) -> UInt32[Array, "layers"]:
    """Computes checksums of the rows of a slot, which `read_request` returned, [layers of the model]."""
    sums = _fold(rows.swa, 1)
    if rows.streams is not None:
        sums = sums.at[-1].add(_fold(rows.streams, 1)[0])
    for name, spec in schema.groups.items():
        for state in (rows.groups[name].state, rows.groups[name].key_state):
            if state is not None:
                sums = sums.at[jnp.array(spec.layers)].add(_fold(state, 1))
    return sums


def _fold(tree, keep):
    """Sums over all but the first `keep` axes, each value times an odd factor that depends on its index."""
    total = jnp.zeros((), jnp.uint32)
    for salt, x in enumerate(jax.tree.leaves(tree)):
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        bits = bits.reshape(*x.shape[:keep], -1)
        index = jnp.arange(bits.shape[-1], dtype=jnp.uint32) + jnp.uint32(salt << 24)
        # Knuth's multiplicative hash; odd, so that no change of one value is lost modulo 2**32.
        weight = index * jnp.uint32(2654435761) | jnp.uint32(1)
        total = total + jnp.sum(bits * weight.reshape((1,) * keep + (-1,)), axis=-1, dtype=jnp.uint32)
    return total
