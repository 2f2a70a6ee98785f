"""Names of the axes of a device mesh. Devices along the last axis are neighbors."""

DATA_AXIS = "data"  # requests, with their slots and blocks
MODEL_AXIS = "model"  # heads, experts and vocabulary of each layer; every device along it runs the same tokens
AXES = (DATA_AXIS, MODEL_AXIS)
