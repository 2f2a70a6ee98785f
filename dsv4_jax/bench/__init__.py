"""The measurements behind `dsv4-jax bench`: single ops, layers, whole models, serving, and plots of the results."""
