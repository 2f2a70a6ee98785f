"""Names of the axes of a device mesh. Devices along the last axis are neighbors."""

DATA_AXIS = "data"  # data parallelism: requests, with their slots and blocks, are distributed over this axis
MODEL_AXIS = "model"  # tensor parallelism: heads, experts and vocabulary are sharded over this axis
AXES = (DATA_AXIS, MODEL_AXIS)
