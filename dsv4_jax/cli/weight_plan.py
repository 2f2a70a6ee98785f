"""The parts of `dsv4-jax plan` for weights: their bytes on each device by kind, and experts in host memory."""

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Column, Table

from dsv4_jax.common.sizes import parse_bytes, readable_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.parallel.mesh import abstract_mesh


# {kind of weights: texts}. A parameter belongs to the first kind that has a text which occurs in the parameter's path.
KINDS = {
    "Engram": (".engram.",),
    "draft layers": ("drafts.",),
    "routed experts": (".mlp.experts.",),
    "shared experts": (".mlp.shared_experts.",),
    "attention": (".self_attn.",),
    "embedding and head": ("embed_tokens.", "lm_head."),
    "routers": (".mlp.gate.",),
    "hyper-connections": ("_hc.", ".hc_head."),
    "norms and others": ("",),
}
SKEWS = 0.0, 1.0  # skews of the estimates, see `selection_shares`
TOKENS = 1, 8, 32  # numbers of tokens in a step of the estimates
HOST_PAGE = 2 << 20  # bytes of a page in which `CudaMemory` maps host memory
STEP_TOKENS = 256  # number of tokens of the largest step of `generate` and `serve` by default


def plan_weights(
    config: DSV4Config, sizes: Mapping[str, int], expert_parallel: bool = False
) -> dict[str, dict[str, int]]:
    """Returns the bytes of a model's weights, stored as in the release: {kind: {"model", "device", "replicated"}}.

    "model" counts the whole model, and "device" the weights on each device of the mesh. "replicated" counts those of a
    device's weights that every device holds. Kinds without weights are left out.

    Args:
      config: configuration of the model.
      sizes: {axis of the mesh: number of devices along it}; empty for one device.
      expert_parallel: whether each device holds whole experts instead of a shard of each expert.

    Raises:
      ValueError: the mesh would split a block of weights that share a scale.
    """
    whole = _sizes(config)
    report = {kind: {"model": 0, "device": 0, "replicated": 0} for kind in KINDS}
    for path, device_bytes in _sizes(config, abstract_mesh(sizes) if sizes else None, expert_parallel).items():
        row = next(report[kind] for kind, texts in KINDS.items() if any(text in path for text in texts))
        model_bytes = whole[path]
        row["model"] += model_bytes
        row["device"] += device_bytes
        row["replicated"] += device_bytes if device_bytes == model_bytes else 0
    return {kind: row for kind, row in report.items() if row["model"]}


def _sizes(config, mesh=None, expert_parallel=False):
    """Returns {path of an array: its bytes on each device of the mesh} for a model stored as in the release.

    An array that several linear maps or layers share has several paths. Only one of them is listed.
    """
    from dsv4_jax.bench.cases import tree_bytes
    from dsv4_jax.checkpoint.random_weights import abstract_model
    from dsv4_jax.nn.parameters import parameter_views

    views = parameter_views(abstract_model(config, mesh, expert_parallel=expert_parallel))
    paths = {id(view.variable): path for path, view in views.items()}
    return {path: tree_bytes(views[path].variable) for path in paths.values()}


def weight_table(weights: Mapping[str, Mapping[str, int]]) -> Table:
    """Returns the table of the result of `plan_weights`."""
    sums = {key: sum(row[key] for row in weights.values()) for key in ("model", "device", "replicated")}
    title = f"Weights, {readable_bytes(sums['device'])} on each device"
    table = number_table(title, "bytes of", "model", "a device", "of which replicated")
    for kind, row in (*weights.items(), ("sum", sums)):
        table.add_row(kind, *(f"{count:,}" for count in row.values()), style="bold" if kind == "sum" else None)
    return table


def plan_experts(config: DSV4Config, expert_memory: str, memory: int, cache_bytes: int, gpu: str) -> dict[str, Any]:
    """Decides how many experts lie in host memory, as `ExpertMemory.plan` does, and estimates the time of steps.

    Args:
      config: configuration of the model, whose weights are stored as in the release.
      expert_memory: bytes of GPU memory for routed experts, such as "60GB". "auto" = the memory that the other weights,
        the cache and the programs leave.
      memory: bytes of the GPU's memory.
      cache_bytes: bytes of the cache.
      gpu: GPU whose measured rates the estimate uses, a key of `READ_RATES`.

    Returns:
      A dictionary:
        experts: number of experts of a layer.
        on_host: number of experts of a layer in host memory.
        host_bytes: bytes of the experts in host memory, in all layers.
        weights_bytes: bytes of the GPU that weights and programs take.
        steps: estimates, [{tokens, skew, milliseconds, misses}]; "misses" is the number of experts read from host
          memory.
        gpu: the argument.

    Raises:
      ValueError: the programs and all weights but the experts in host memory do not fit the GPU; layers have different
        numbers of experts; or a matrix of an expert in host memory would not be a whole number of pages.
    """
    from dsv4_jax.checkpoint.keys import TABLES, weights
    from dsv4_jax.checkpoint.placement import expert_shapes
    from dsv4_jax.expert_pages import TokenCost, program_bytes
    from dsv4_jax.expert_pages.token_cost import READ_RATES

    layers, shapes = expert_shapes(weights(config, "release"))
    experts = shapes[0][0]
    matrices = [math.prod(shape[1:]) for shape in shapes]  # bytes of the FP4 codes of each matrix of an expert
    slice_bytes = len(layers) * sum(matrices)  # one expert of every layer
    sizes = {path: nbytes for path, nbytes in _sizes(config).items() if not path.endswith(TABLES)}
    other_weights = sum(sizes.values()) - experts * slice_bytes  # all but the experts' codes and the tables on the host
    programs = program_bytes(STEP_TOKENS, config)
    budget = memory - other_weights - programs - cache_bytes
    if expert_memory != "auto":
        budget = parse_bytes(expert_memory, "expert_memory")
    on_device = min(experts, max(budget, 0) // slice_bytes)
    on_host = experts - on_device
    needed = other_weights + on_device * slice_bytes + programs
    if needed > memory:
        raise ValueError(
            f"--memory {readable_bytes(memory)} is too little for {readable_bytes(needed)}: weights, of which "
            f"{readable_bytes(on_device * slice_bytes)} experts, and {readable_bytes(programs)} for programs"
        )
    if on_host and any(nbytes % HOST_PAGE for nbytes in matrices):
        raise ValueError(
            f"{on_host} of {experts} experts a layer would have to lie in host memory, where a matrix must "
            f"be whole pages of {HOST_PAGE} bytes; the model's have {' and '.join(map(str, matrices))}"
        )
    cost = TokenCost(
        layers=config.num_hidden_layers,
        experts=experts,
        chosen=config.num_experts_per_tok,
        expert_bytes=sum(matrices),
        # All weights but the routed experts with their scales, the draft layers, and the tables in host memory.
        other_bytes=sum(
            nbytes for path, nbytes in sizes.items() if ".mlp.experts." not in path and not path.startswith("drafts.")
        ),
        read_rate=READ_RATES[gpu],
    )
    return {
        "experts": experts,
        "on_host": on_host,
        "host_bytes": on_host * slice_bytes,
        "weights_bytes": needed,
        "steps": [
            {
                "tokens": tokens,
                "skew": skew,
                "milliseconds": round(cost.milliseconds(on_host, skew, tokens), 1),
                "misses": round(cost.misses(on_host, skew, tokens), 1),
            }
            for tokens in TOKENS
            for skew in SKEWS
        ],
        "gpu": gpu,
    }


def expert_table(report: dict[str, Any]) -> Table:
    """Returns the table of the result of `plan_experts`."""
    title = (
        f"{report['on_host']} of {report['experts']} experts a layer stay in host memory "
        f"({report['host_bytes'] / 1e9:.1f} GB). Estimated milliseconds a step, {report['gpu'].upper()}"
    )
    table = number_table(title, "tokens of a step", "uniform routing", "skew 1")
    for tokens in TOKENS:
        times = [f"{row['milliseconds']:.1f}" for row in report["steps"] if row["tokens"] == tokens]
        table.add_row(str(tokens), *times)
    return table


def number_table(title: str, label: str, *columns: str) -> Table:
    """Returns an empty table, with a first column `label` for labels and further `columns` for numbers."""
    return Table(label, *(Column(name, justify="right") for name in columns), title=title, title_justify="left")
