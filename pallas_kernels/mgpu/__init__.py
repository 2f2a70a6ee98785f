"""Building blocks of kernel bodies that Pallas lacks: instructions written in MLIR and PTX.

Each has a meaning in jax.numpy, which the interpreter runs, unless its module says that it is for GPUs alone.
"""
