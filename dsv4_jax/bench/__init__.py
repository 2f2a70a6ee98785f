"""Benchmarks: cases, timing, stacks of layers, plots."""
