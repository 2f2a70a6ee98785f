"""Compiles for an H100 where there is none."""

import jax
from jax.experimental import topologies


# Facts of the hardware, as XLA's GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  name: "NVIDIA H100 80GB HBM3"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100_mesh(devices):
    """A mesh ("model",) of so many H100 of one host, which are not there."""
    links = _H100.replace("  name:", "  device_interconnect_info { active_links: 18 }\n  name:")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=links, topology=f"1x1x{devices}")
    found = topologies.make_mesh(topology, (devices,), ("model",)).devices
    return jax.sharding.Mesh(found, ("model",), axis_types=(jax.sharding.AxisType.Explicit,))


def compile_for_h100(name, function, *args, **jit_options):
    """The compiled executable of a jitted function of arrays or ShapeDtypeStructs; prints `kernel NAME` first."""
    topology = topologies.get_topology_desc("h100", "cuda", target_config=_H100, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    print(f"kernel {name}", flush=True)
    return jax.jit(function, **jit_options).trace(*shapes).lower().compile()
