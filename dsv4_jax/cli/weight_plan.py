"""The part of `dsv4-jax plan` for weights: their bytes on each device of a mesh, by kind."""

from collections.abc import Mapping

from rich.table import Table

from dsv4_jax.cli.expert_plan import number_table
from dsv4_jax.common.sizes import readable_bytes
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
    from dsv4_jax.bench.cases import tree_bytes
    from dsv4_jax.bench.random_steps import abstract_model
    from dsv4_jax.nn.parameters import parameter_views

    mesh = abstract_mesh(sizes) if sizes else None
    whole = parameter_views(abstract_model(config))
    sharded = parameter_views(abstract_model(config, mesh, expert_parallel=expert_parallel))
    report = {kind: {"model": 0, "device": 0, "replicated": 0} for kind in KINDS}
    # An array that several linear maps or layers share has several paths. It counts at one of these paths only.
    paths = {id(view.variable): path for path, view in sharded.items()}
    for path in paths.values():
        kind = next(kind for kind, texts in KINDS.items() if any(text in path for text in texts))
        row = report[kind]
        model_bytes = tree_bytes(whole[path].variable)
        device_bytes = tree_bytes(sharded[path].variable)
        row["model"] += model_bytes
        row["device"] += device_bytes
        row["replicated"] += device_bytes if device_bytes == model_bytes else 0
    return {kind: row for kind, row in report.items() if row["model"]}


def weight_table(weights: Mapping[str, Mapping[str, int]]) -> Table:
    """Returns the table of the result of `plan_weights`."""
    sums = {key: sum(row[key] for row in weights.values()) for key in ("model", "device", "replicated")}
    title = f"Weights, {readable_bytes(sums['device'])} on each device"
    table = number_table(title, "bytes of", "model", "a device", "of which replicated")
    for kind, row in (*weights.items(), ("sum", sums)):
        table.add_row(kind, *(f"{count:,}" for count in row.values()), style="bold" if kind == "sum" else None)
    return table
