"""Compares the gradient of every parameter of a model with central differences and with the dense cache's gradient."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from dense_cache import DenseCache, DenseHandle, whole_sequences
from jaxtyping import Array, Float, Int
from tiny_model import Tensors, apart, assemble, for_training, named_tensors

from dsv4_jax import KVCacheManager, load_checkpoint
from dsv4_jax.cache import Batch, Decisions
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import packaged_checkpoint
from dsv4_jax.quant import FakeQuantFormat, KVFormat


TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    "was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there "
    "be light: and there was light. And God saw the light, that it was good."
)
HEAD = """\
# Gradients

`examples/king_james/gradients.py` wrote this page. It compares the gradient of the packaged model's cross-entropy on
{tokens} bytes, in float32, for each of its {count} parameters that gradients train. A row is a parameter in all
layers that have it, with the largest difference of any of them.

* **Central differences** of the loss along random directions in format "plain", as a share of the gradient's norm: at
  most {finite:.1e} without indexers. Experts stay selected. Accuracy is lost where a gradient is small.
* **Dense cache**: the gradient through `DenseCache`, as a share of the largest component, at most {dense:.1e}.
* **v4**: the same in format "v4", with entries as bytes in both, at most {v4:.1e}. RoPE channels are bfloat16, and so
  are their gradients.
* **FakeQuantFormat**: the same in `FakeQuantFormat()`, straight-through in both, at most {fake_quant:.1e}.

An indexer's parameters have no gradient here, as [expected](../differentiable.md). Their rows are about the gradient of
`DenseCache.index_loss`; central differences cross edges of ReLUs.

"""
# Parameters that only select entries; a selection has no gradient. The dense cache's index loss trains them.
INDEXER = "indexer"
# Limit of a step of central differences. A step changes the loss by at most about STEP. It changes a parameter's values
# by at most STEP times their root mean square, or STEP times 0.1 if the root mean square is below 0.1.
STEP = 1e-2


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Writes a page with the differences between the packaged model's gradients and other gradients, in float32.

    For example:
      python examples/king_james/gradients.py --out docs/notes/gradients.md

    Attributes:
      out: file of the page (Markdown).
      checkpoint: folder of another model. Default: the packaged one.
      directions: number of random directions of each parameter for central differences.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    directions: int = 2

    def run(self) -> None:
        """Computes and writes the table."""
        model = load_checkpoint(self.checkpoint or packaged_checkpoint(), dtype=jnp.float32)
        length = 2 * model.config.sliding_window
        ids = np.frombuffer(TEXT.encode()[: length + 1], np.uint8).astype(np.int32)
        self.out.write_text(page(compare(model.config, named_tensors(model), ids, self.directions), length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByteCache(DenseCache):
    """A dense cache that can pass gradients like a quantized paged cache: through the RoPE dims of entries alone.

    Attributes:
      as_bytes: bool; whether it does. If False, gradients pass through all dims of entries.
    """

    as_bytes: Any = False

    def handle(self, layer: int | Int[Array, ""], batch: Batch, *, like: int | None = None) -> DenseHandle:
        return _ByteHandle(self, batch, super().handle(layer, batch, like=like).spec)


class _ByteHandle(DenseHandle):
    def flush(self, *args: Any, **options: Any) -> DenseHandle:
        handle = super().flush(*args, **options)
        assert isinstance(self.cache, ByteCache)
        stored = jnp.arange(handle.entries.shape[-1]) < self._group.entry.nope_dim
        still = jax.lax.stop_gradient(handle.entries)
        entries = jnp.where(self.cache.as_bytes & stored[None, None], still, handle.entries)
        return dataclasses.replace(handle, entries=entries)


def paged_forward(
    config: DSV4Config, ids: Int[np.ndarray, "S"], kv_format: str | KVFormat
) -> Callable[[Tensors, Decisions | None], tuple[Float[Array, "S V"], Decisions]]:
    """Returns a function (parameters, experts) -> (logits, experts) that runs a model over `ids` with a paged cache.

    The argument `experts` says which experts each token takes; if it is None, the model selects them. The result
    `experts` says which ones were taken.
    """
    sizes = {"num_blocks": -(-len(ids) // 128), "max_requests": 1, "max_context": -(-len(ids) // 128) * 128}
    manager = KVCacheManager(config, kv_format=kv_format, dtype=jnp.float32, **sizes)
    batch = manager.prepare_forward({manager.admit(ids): ids}, prefill_size=len(ids))
    cache = manager.init_cache()

    def forward(tensors, decisions):
        model = assemble(config, tensors, jnp.float32)
        given = dataclasses.replace(batch, decisions=decisions)
        hidden, _, made, _ = model.forward_decisions(cache, given, ("experts",))
        return model.logits(hidden), made

    return forward


@dataclasses.dataclass(frozen=True)
class Difference:
    """A parameter's gradient, and the differences of other gradients from it as shares of its size.

    Attributes:
      norm: norm of the gradient in format "plain": that of the cross-entropy, or for an indexer's parameters that of
        the dense cache's index loss.
      finite: largest difference from central differences along a direction, divided by the norm.
      dense: largest difference of a component from the dense cache's gradient, divided by that gradient's largest
        component; None for an indexer.
      v4: like `dense`, with the paged cache in format "v4". The dense cache rounds, and passes gradients `as_bytes`.
      fake_quant: like `dense`, with the paged cache in `FakeQuantFormat`. The dense cache rounds with straight-through
        gradients.
    """

    norm: float
    finite: float
    dense: float | None = None
    v4: float | None = None
    fake_quant: float | None = None


def compare(config: DSV4Config, tensors: Tensors, ids: Int[np.ndarray, "S1"], directions: int) -> dict[str, Difference]:
    """Returns {path of a parameter: differences of its gradient}, for the parameters that gradients train.

    Args:
      config: the model.
      tensors: the model's arrays by path, float32.
      ids: [S + 1] token ids of a text, S a multiple of the window. The text is so short that all entries are selected.
      directions: number of random directions of each parameter.
    """
    trained, fixed = apart(tensors)
    inputs = ids[:-1]
    targets = ids[1:]
    formats = {"dense": "plain", "v4": "v4", "fake_quant": FakeQuantFormat()}
    forward = {name: paged_forward(config, inputs, kv_format) for name, kv_format in formats.items()}

    def paged(trained, name):
        logits, experts = forward[name](trained | fixed, None)
        return _cross_entropy(logits, targets), experts

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def dense(trained, quantize, as_bytes):
        cache: Any = ByteCache.make(config, 1, len(inputs), kv_format="v4", dtype=jnp.float32)
        cache = dataclasses.replace(cache, quantize=quantize, as_bytes=as_bytes)
        model = for_training(assemble(config, trained | fixed, jnp.float32))
        hidden, cache = model(cache, whole_sequences(jnp.asarray(inputs)[None]))
        assert isinstance(cache, ByteCache)
        return _cross_entropy(model.logits(hidden), targets) + cache.index_loss, cache.index_loss

    on = jnp.bool_(True)
    off = jnp.bool_(False)
    references = {
        "dense": dense(trained, off, off)[1],
        "v4": dense(trained, on, on)[1],
        "fake_quant": dense(trained, on, off)[1],
    }
    gradients = {}
    experts = None
    for name in formats:
        gradients[name], selected = jax.jit(jax.grad(paged, has_aux=True), static_argnames="name")(trained, name=name)
        experts = selected if name == "dense" else experts
    logits = jax.jit(lambda tensors: forward["dense"](tensors | fixed, experts)[0])

    def losses(tensors):
        """Computes the tokens' losses from logits in float64, so that only the logits' own rounding is left."""
        exact = np.asarray(logits(tensors), np.float64)
        peak = exact.max(axis=1)
        return peak + np.log(np.exp(exact - peak[:, None]).sum(axis=1)) - exact[np.arange(len(targets)), targets]

    def index_loss(tensors):
        return np.asarray(dense(tensors, off, off)[0][1], np.float64)

    result = {}
    for path in trained:
        if INDEXER in path:
            assert not any(np.any(gradient[path]) for gradient in gradients.values()), path
            # A smaller step crosses fewer kinks of ReLUs.
            result[path] = _finite(index_loss, trained, path, references["dense"][path], directions, STEP / 10)
            continue
        difference = _finite(losses, trained, path, gradients["dense"][path], directions)
        others = {name: _largest(gradients[name][path], references[name][path]) for name in formats}
        result[path] = dataclasses.replace(difference, **others)
    return result


def _cross_entropy(logits, targets):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(targets)))


def _finite(losses, tensors, path, gradient, directions, largest_step=STEP):
    """Compares a gradient with central differences of the mean of `losses(tensors)` along random directions."""
    value = np.asarray(tensors[path])
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    gradient = np.asarray(gradient, np.float64)
    norm = float(np.linalg.norm(gradient))
    worst = 0.0
    step = np.float32(largest_step * min(1 / max(norm, 1e-9), max(np.sqrt(np.mean(value**2)), 0.1)))
    for _ in range(directions):
        direction = rng.normal(size=value.shape).astype(np.float32)
        ahead, behind = (value + sign * step * direction for sign in (1, -1))
        change = np.mean(losses(tensors | {path: jnp.asarray(ahead)}) - losses(tensors | {path: jnp.asarray(behind)}))
        # The step from `behind` to `ahead` that was taken, which rounding to float32 has changed a little.
        expected = np.vdot(gradient, ahead.astype(np.float64) - behind)
        worst = max(worst, float(abs(change - expected) / (2 * step * norm)))
    return Difference(norm, worst)


def _largest(gradient, reference):
    return float(np.abs(gradient - reference).max() / np.abs(reference).max())


def page(differences: dict[str, Difference], tokens: int) -> str:
    """Returns the page of docs/notes."""
    trained = [difference for path, difference in differences.items() if INDEXER not in path]
    names = ("finite", "dense", "v4", "fake_quant")
    summary = {name: max(getattr(difference, name) for difference in trained) for name in names}
    return HEAD.format(tokens=tokens, count=len(differences), **summary) + table(differences)


def table(differences: dict[str, Difference]) -> str:
    """Returns a Markdown table with a row for each kind of parameter: the largest differences of all layers."""
    kinds: dict[str, list[Difference]] = {}
    for path, difference in differences.items():
        kinds.setdefault(re.sub(r"^model\.layers\.\d+", "layer", path), []).append(difference)
    lines = [
        "| parameter | layers | smallest norm | central differences | dense cache | v4 | FakeQuantFormat |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, rows in kinds.items():
        columns = [[getattr(row, name) for row in rows] for name in ("finite", "dense", "v4", "fake_quant")]
        cells = ["" if None in column else f"{max(column):.1e}" for column in columns]
        lines.append(f"| `{kind}` | {len(rows)} | {min(row.norm for row in rows):.1e} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    tyro.cli(Gradients).run()
