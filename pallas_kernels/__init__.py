"""Mosaic-GPU kernels of the cache: arrays in, arrays out; imports jax and numpy only.

Each kernel will stand in a file named like the op in `dsv4_jax/ops` that calls it.
"""
