"""The numbers of operations and bytes of a step, from which a lower bound of its time follows."""

import math

import numpy as np
from flax import nnx

from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.bench.random_steps import RandomSteps
from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.config import DSV4Config
from pallas_kernels.runtime.pytrees import total_bytes


def step_work(steps: RandomSteps, context: int) -> tuple[int, int, int]:
    """Returns the minimum work of a device in a step.

    Args:
      steps: runs the step.
      context: number of tokens that each request holds after the step.

    Returns:
      (operations, bytes, head bytes). Operations are the floating-point operations of the layers' matrix products; the
      products of draft layers do not count. Bytes are the weights, attended rows and scored keys, each read once. Head
      bytes are the part of the bytes that belongs to the head's weights.
    """
    model = steps.model.module
    requests = steps.shard_requests
    request_operations, request_bytes = cache_work(steps, context)
    products, weights = weight_work(model, steps.manager.schema.config, requests, steps.tokens, steps.drafts)
    head = (1 + draft_passes(model.config, steps.drafts)) * tree_bytes(model.lm_head)
    return requests * request_operations + products, requests * request_bytes + weights, head


def weight_work(model: nnx.Module, config: DSV4Config, requests: int, tokens: int, drafts: int) -> tuple[int, int]:
    """Counts a device's work with weights in a step: operations of matrix products, and bytes of weights that it reads.

    Each pass through the draft layers reads their weights and the head. Each draft reads DSpark's `markov_w2`. Few rows
    of the tables `embed_tokens`, `embedding` (of Engram), `markov_w1` and `tid2eid` are read, so these tables are left
    out. The bytes of routed experts are the expected number of bytes if tokens select experts at random.

    Args:
      model: the model or some of its layers.
      config: configuration of the model.
      requests: number of requests of the device.
      tokens: number of tokens of each request in the step.
      drafts: number of tokens that the step drafts for each request.

    Returns:
      (operations, bytes). The operations are floating-point operations of the layers' products. Products of draft
      layers and of the head do not count.
    """
    passes = draft_passes(config, drafts)
    tables = dict.fromkeys(("embed_tokens", "embedding", "markov_w1", "tid2eid"), 0)
    reads_by_name = tables | {"markov_w2": drafts, "lm_head": 1 + passes}
    operations = 0.0
    nbytes = 0.0
    for path, weight in nnx.to_flat_state(nnx.state(model)):
        is_draft = path[0] == "drafts"
        is_expert = "experts" in path
        # The number of inputs that are multiplied by the weight each time that the weight is read.
        rows = requests * (config.drafts.block_size if is_draft and config.drafts else tokens)
        experts, selected = config.layer_experts(config.num_hidden_layers if is_draft else 0)
        share = selected / experts  # share of the layer's experts that one token selects

        reads = next((reads_by_name[name] for name in path if name in reads_by_name), passes if is_draft else 1)
        read_share = 1 - (1 - share) ** rows if is_expert else 1  # experts that no token selects are not read
        nbytes += tree_bytes(weight) * reads * read_share

        if "layers" in path and not is_draft and len(weight.shape) > 2:
            # The number of values in this device's shard.
            values = math.prod(weight.shape) * tree_bytes(weight) / total_bytes(weight)
            operations += 2 * rows * reads * values * (share if is_expert else 1)
    return round(operations), round(nbytes)


def cache_work(steps: RandomSteps, context: int) -> tuple[int, int]:
    """Returns the work of attention and indexers for one request in a step, on one device: (operations, bytes read).

    Args:
      steps: runs the step.
      context: number of tokens that the request holds after the step.
    """
    schema = steps.manager.schema
    config = schema.config
    row_bytes = tree_bytes(schema.window_codec.struct)
    draft_windows = config.num_draft_layers * draft_passes(config, steps.drafts)
    bytes_read = draft_windows * min(context, config.sliding_window) * row_bytes
    visible_tokens = np.arange(context - steps.tokens, context) + 1  # number of tokens up to each token of the step
    attended = scored = 0
    for spec in config.specs:
        bytes_read += min(context, config.window(spec.layer)) * row_bytes
        attended += np.minimum(visible_tokens, config.window(spec.layer)).sum()
        if spec.group is not None:
            group = schema.groups[spec.group]
            visible = visible_tokens // spec.compress_rate
            topk = context if spec.selection is None else config.topk(spec.selection)
            attended += np.minimum(visible, topk).sum()
            bytes_read += min(visible[-1], steps.tokens * topk) * tree_bytes(group.entry.struct)
            if spec.selects and group.key is not None:
                keys = visible
                if spec.candidates is not None and not spec.makes_candidates:
                    keys = np.minimum(visible, config.candidate_topk_blocks * config.candidate_block_size)
                scored += keys.sum()
                bytes_read += min(visible[-1], keys.sum()) * tree_bytes(group.key.struct)
    mesh = steps.manager.mesh
    heads = config.num_attention_heads // (1 if mesh is None else mesh.shape.get(MODEL_AXIS, 1))
    operations = 4 * heads * config.head_dim * attended
    return int(operations + 2 * config.index_n_heads * config.index_head_dim * scored), int(bytes_read)


def draft_passes(config: DSV4Config, count: int) -> int:
    """Returns the number of passes through the draft layers that draft `count` tokens for a request."""
    return 0 if config.drafts is None else -(-count // config.drafts.block_size)
