"""Building blocks of kernel bodies that Pallas lacks: instructions written in MLIR and PTX.

Functions that kernel bodies call also have implementations in jax.numpy, which Pallas's interpreter runs. Modules and
functions that are for GPUs alone say so.
"""
