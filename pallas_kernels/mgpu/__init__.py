"""Building blocks of kernel bodies that Pallas lacks: instructions written in MLIR and PTX.

Each block also has an implementation in jax.numpy, which Pallas's interpreter runs, unless its module says that it is
for GPUs alone.
"""
