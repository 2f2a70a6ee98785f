"""DeepSeek-V4.1 against DeepSeek's own code, mostly in float32 with plain rows. Tolerances are those of the goldens.

The golden's selections, candidates and experts are equal to ours, not only close, because the gaps between what is
chosen and what is not are 20 times the noise of float32. By the golden's README, each of these mistakes would move
logits by 0.8 to 6, ten thousand times the tolerance: a norm of query heads, keys from rotated latents, no candidates, a
newest block that is no candidate, rotation by a group's last position, a mean instead of the gated pooling, plain RoPE
in layers without entries, no YaRN, a block's own weights `pre`, `comb` summed over its second index, eps 1e-6, the bias
of images, expert weights with the bias, a window of one token less, the selection of the layer that stores the entries,
no Engram, hashes of raw ids, a padding id that is not mapped, other primes, no root in the gate.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache.newest_tokens import advance_ngrams
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.cli import main
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import ResidualStreams, StepCarry
from dsv4_jax.nn.engram import look_up_ahead
from dsv4_jax.ops import candidate_entries
from dsv4_jax.quant import V41Format
from tests.oracle.layers import RecordingHandle, Source, entries, reader, run_layer
from tests.paths import DATA


FOLDER = DATA / "official_v41"
QUANTIZED = DATA / "official_v41_fp8"


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FOLDER, dtype=jnp.float32)


def make_manager(config):
    return KVCacheManager(
        config, num_blocks=64, max_requests=2, max_context=128, block_tokens=16, max_query_tokens=4,
        kv_format="plain", dtype=jnp.float32,
    )  # fmt: skip


@functools.partial(jax.jit, donate_argnames="cache")
def record(model, cache, batch):
    hidden, recorded, cache = model.record(cache, batch)
    return model.logits(hidden), recorded, cache


def run(model, ids, chunks):
    """Feeds ids [B, T] in chunks of so many tokens: (logits [B, T, V], {name: {layer: [B, T, ...]}}, cache)."""
    manager = make_manager(model.config)
    cache = manager.init_cache()
    slots = [manager.admit(num_tokens=ids.shape[1]) for _ in ids]
    logits = []
    recorded = []
    at = 0
    for chunk in chunks:
        batch = manager.prepare_forward({slot: row[at : at + chunk] for slot, row in zip(slots, ids, strict=True)})
        output, values, cache = record(model, cache, batch)

        def by_request(x, chunk=chunk):
            return np.asarray(x)[: len(ids) * chunk].reshape(len(ids), chunk, *x.shape[1:])

        logits.append(by_request(output))
        recorded.append(jax.tree.map(by_request, values))
        at += chunk
    return np.concatenate(logits, 1), jax.tree.map(lambda *x: np.concatenate(x, 1), *recorded), cache


@pytest.fixture(scope="module")
def prefill(model, golden):
    return run(model, golden["ids"].astype(np.int32), [61])


def close(got, want, atol):
    chex.assert_trees_all_close(np.asarray(got, np.float32), want, rtol=0, atol=atol)


def test_logits(prefill, golden):
    close(prefill[0], golden["logits"], 1e-4)
    assert (prefill[0].argmax(-1) == golden["logits"].argmax(-1)).all()


def test_what_layers_compute(model, prefill, golden):
    recorded = prefill[1]
    for layer in range(model.config.num_hidden_layers):
        close(recorded["attention_out"][layer], golden[f"attn_out_{layer}"], 3e-5)
        close(recorded["streams"][layer][:, golden["stream_at"]], golden["streams"][layer], 1e-4)
        chex.assert_trees_all_equal(np.sort(recorded["experts"][layer], -1), golden["experts"][layer].astype(np.int32))
    for layer in (4, 9):
        close(recorded["attention_in"][layer], golden[f"attn_in_{layer}"], 8e-5)
    selecting = [spec.layer for spec in model.config.specs if spec.selects]
    assert set(recorded["selection"]) == set(selecting)
    for layer in selecting:
        chex.assert_trees_all_equal(recorded["selection"][layer], golden[f"topk_{layer}"].astype(np.int32))


def check_cache(cache, golden, tokens=61):
    config = cache.schema.config
    for layer, spec in enumerate(config.specs):
        handle = reader(cache, layer)
        rows = jax.tree.map(lambda x: x[layer, :2], cache.swa)  # noqa: B023
        ring = np.asarray(cache.schema.window_codec.decode(rows, jnp.float32))
        positions = np.arange(tokens - config.sliding_window, tokens)
        close(ring[:, positions % ring.shape[1]], golden[f"ring_{layer}"][:, positions % config.sliding_window], 6e-5)
        if not spec.owner:
            continue
        count = tokens // spec.compress_rate
        view = handle.read_classical_view()
        close(view.codec.decode(entries(view, count), jnp.float32), golden[f"entries_{layer}"], 6e-5)
        view = handle.read_indexer_view()
        close(view.codec.decode(entries(view, count)), golden[f"keys_{layer}"], 6e-5)
        if spec.compress_rate > 1:
            state = cache.groups[spec.group].state
            at = (tokens - 1) % state.kv.shape[2]
            pending = np.stack([state.kv[spec.index, :2, at], state.gate[spec.index, :2, at]], 1)
            close(pending, golden[f"pending_{layer}"], 2e-5)


def test_what_the_cache_holds(prefill, golden):
    check_cache(prefill[2], golden)


@pytest.mark.parametrize("chunks", [[1] * 61, [16, 1, 16, 1, 1, 15, 11]], ids=["one by one", "chunks"])
def test_chunks_give_the_same(model, golden, chunks):
    logits, recorded, cache = run(model, golden["ids"].astype(np.int32), chunks)
    close(logits, golden["logits"], 1e-4)
    for layer, selection in recorded["selection"].items():
        chex.assert_trees_all_equal(selection, golden[f"topk_{layer}"].astype(np.int32))
    check_cache(cache, golden)


def test_forks_and_rewinds_give_the_same(model, golden):
    """A request and its copy read on side by side, and each first takes back three wrong tokens."""
    manager = make_manager(model.config)
    ids = golden["ids"][0].astype(np.int32)
    parent = manager.admit(num_tokens=ids.size)
    _, _, cache = record(model, manager.init_cache(), manager.prepare_forward({parent: ids[:21]}))
    (copy,), cache = manager.fork(cache, parent, 1)
    wrong = np.append((ids + 1) % 150, [1, 2])  # the last ones, too, are three for each request
    for at in range(21, 61, 4):
        batch = manager.prepare_forward({parent: wrong[at : at + 3], copy: wrong[at + 3 : at + 6]})
        _, _, cache = record(model, cache, batch)
        for slot in (parent, copy):
            manager.rewind(slot, manager.length(slot) - at)
        logits, _, cache = record(
            model, cache, manager.prepare_forward(dict.fromkeys((parent, copy), ids[at : at + 4]))
        )
        close(logits[:8].reshape(2, 4, -1), np.stack([golden["logits"][0, at : at + 4]] * 2), 1e-4)


class RecordingCache:
    """A step's cache whose handles keep what indexers compute, by layer."""

    def __init__(self, cache, record):
        self.cache = cache
        self.record = record

    def begin_step(self, batch):
        raise AssertionError("the step has begun")

    def handle(self, layer, batch, *, like=None):
        return RecordingHandle(self.cache.handle(layer, batch), None, self.record.setdefault(layer, {}))


def test_scores_candidates_and_mixing_weights(model, golden):
    """Layer by layer, without loops."""
    ids = golden["ids"].astype(np.int32)
    manager = make_manager(model.config)
    slots = [manager.admit(num_tokens=ids.shape[1]) for _ in ids]
    batch = manager.prepare_forward(dict(zip(slots, ids, strict=True)))

    @jax.jit
    def step(model, cache):
        cache = cache.begin_step(batch)
        ngrams, cache = advance_ngrams(cache, batch, model.model.token_map.get_value())
        x = model.model.embed(batch)
        residual = ResidualStreams.begin(jnp.broadcast_to(x[:, None], (x.shape[0], 4, x.shape[1])))
        modules = {layer.layer: layer.engram for layer in model.model.layers if layer.engram is not None}
        x, engram_rows = look_up_ahead(modules, ngrams, x)
        carry = StepCarry(engram_rows=engram_rows)
        record = {}
        mixing = []
        for layer in model.model.layers:
            residual, carry, cache = layer(residual, RecordingCache(cache, record), batch, carry)
            mixing.append(residual.mixing)
        return record, carry.candidates, jnp.stack(mixing)

    record, candidates, mixing = step(model, manager.init_cache())

    def by_request(x):
        return np.asarray(x)[: ids.size].reshape(*ids.shape, -1)

    want = golden["candidate_blocks"].astype(np.int32)
    chex.assert_trees_all_equal(by_request(candidates[6]), want)
    entries = np.asarray(candidate_entries(jnp.asarray(want), 4))
    for spec in model.config.specs:
        if not spec.selects:
            continue
        want = golden[f"index_score_{spec.layer}"]
        got = by_request(record[spec.layer]["scores"])
        if spec.candidates not in (None, spec.layer):  # only those of the candidates are computed
            exists = (entries >= 0) & (entries < want.shape[-1])
            want = np.where(exists, np.take_along_axis(want, np.where(exists, entries, 0), -1), -np.inf)
        got = got[..., : want.shape[-1]]
        seen = np.isfinite(want)
        close(np.where(seen, got, 0), np.where(seen, want, 0), 5e-5)
    pre = np.stack([by_request(x)[:, golden["stream_at"], :4] for x in mixing])
    close(pre, golden["pre"], 2e-5)


def test_greedy_tokens_through_the_engine(model, golden):
    """Twice: the second time, prompts begin with blocks and windows of the first. Wrong drafts are rewound."""
    manager = make_manager(model.config)
    prefix = PrefixCache(manager, key="v41")
    engine = Engine(model, manager, token_budget=13, prefix=prefix, drafter=PromptLookup())
    for _ in range(2):
        requests = [
            engine.add(prompt.tolist(), max_new_tokens=golden["greedy_tokens"].shape[1])
            for prompt in golden["greedy_prompt"]
        ]
        while engine.busy:
            engine.step()
        chex.assert_trees_all_equal(np.array([r.generated for r in requests]), golden["greedy_tokens"].astype(int))
    assert prefix.metrics.hits == 2


@pytest.mark.slow
def test_the_command_line_scores_as_the_golden_does(golden, tmp_path):
    np.save(tmp_path / "ids.npy", golden["ids"])
    arguments = ["score", "--checkpoint", FOLDER, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz"]
    arguments += ["--dtype", "float32", "--cache-format", "plain", "--layers"]
    assert main([str(argument) for argument in (*arguments, "--chunk", 25, "--decode-from", 50)]) == 0
    scores = np.load(tmp_path / "scores.npz")
    close(scores["logits"], golden["logits"], 1e-4)
    for layer in range(12):
        close(scores[f"attn_out_{layer}"], golden[f"attn_out_{layer}"], 3e-5)
    for layer in (4, 9):
        close(scores[f"attn_in_{layer}"], golden[f"attn_in_{layer}"], 8e-5)
    assert main([str(argument) for argument in (*arguments, "--window-only")]) == 0
    alone = np.load(tmp_path / "scores.npz")
    for layer in (0, 1):
        close(alone[f"attn_out_{layer}"], golden[f"attn_out_{layer}"], 3e-5)
    # Layer 2 has an entry from the second token on.
    assert (np.abs(alone["attn_out_2"] - golden["attn_out_2"]).max(-1) > 1e-3)[:, 1:].all()


def test_the_quantized_release():
    """Its weights stay quantized, in blocks of 32 x 32."""
    golden = np.load(QUANTIZED / "golden.npz")
    model = load_checkpoint(QUANTIZED, dtype=jnp.float32, weights="quantized")
    logits, recorded, _ = run(model, golden["ids"].astype(np.int32), [golden["ids"].shape[1]])
    close(logits, golden["logits"], 1e-4)
    for layer, selection in recorded["selection"].items():
        chex.assert_trees_all_equal(selection, golden[f"topk_{layer}"].astype(np.int32))


@pytest.fixture(scope="module")
def rows():
    """The release's arithmetic: bfloat16, and rows of the cache that are rounded to its formats."""
    return np.load(FOLDER / "golden_rows.npz")


def check_rows(stored, golden_bytes):
    """Compares rows of a cache, without their padding, with [..., bytes]: the codes, then the scales."""
    codes, scale = (np.asarray(x) for x in jax.tree.leaves(stored))
    width = golden_bytes.shape[-1] - codes.shape[-1]
    chex.assert_trees_all_equal(codes, golden_bytes[..., : codes.shape[-1]])
    chex.assert_trees_all_equal(scale[..., :width], golden_bytes[..., codes.shape[-1] :])


@pytest.mark.parametrize("layer", [1, 2, 4, 6, 9])
def test_rows_are_encoded_to_the_bytes_of_the_release(rows, layer):
    codecs = dict(window=V41Format().window(80, 16), entry=V41Format().entries(80, 16), key=V41Format().keys(32))
    stored = [name for name in codecs if f"{name}_{layer}" in rows]
    assert stored == dict.fromkeys((1, 9), ["window"]).get(layer, [*codecs][layer == 2 :])
    for name in stored:
        values = jnp.asarray(rows[f"{name}_{layer}"], jnp.bfloat16)
        check_rows(codecs[name].encode(values), rows[f"{name}_bytes_{layer}"])


@pytest.fixture(scope="module")
def rounded_model():
    return load_checkpoint(FOLDER, dtype=jnp.bfloat16)


@pytest.mark.parametrize("layer", [1, 4, 6, 9])
def test_attention_of_a_layer_with_rounded_rows(rounded_model, rows, layer):
    """On the file's inputs and selection. Layer 9 reads layer 6's entries, and selects within its candidates."""
    spec = rounded_model.config.specs[layer]
    source = Source(6, rows["attn_in_6"], rows["candidate_blocks"]) if layer == 9 else None
    given = rows[f"topk_{layer}"] if spec.selects else None
    out, results, cache = run_layer(
        rounded_model, layer, rows[f"attn_in_{layer}"], [61], kv_format="v41", dtype=jnp.bfloat16, given=given,
        source=source,
    )  # fmt: skip
    difference = np.abs(out - rows[f"attn_out_{layer}"])
    assert difference.max() <= 8e-3 and difference.mean() <= 1e-4
    window = jax.tree.map(lambda x: x[layer], cache.swa)
    positions = np.arange(61 - rounded_model.config.sliding_window, 61)
    ring = jax.tree.leaves(window)[0].shape[1]
    check_rows(jax.tree.map(lambda x: x[:, positions % ring], window), rows[f"window_bytes_{layer}"][:, positions])
    if not spec.selects:
        return
    count = 61 // spec.compress_rate
    stored = 6 if source else layer
    handle = reader(cache, layer)
    check_rows(entries(handle.read_classical_view(), count), rows[f"entry_bytes_{stored}"])
    check_rows(entries(handle.read_indexer_view(), count), rows[f"key_bytes_{stored}"])
    want = rows[f"index_score_{layer}"]
    allowed = np.isfinite(want)
    if source:
        config = rounded_model.config
        scores = block_scores(rows["index_score_6"], config)
        check_selection(results["candidates"], scores, config.candidate_topk_blocks)
    else:
        # The release rounds products to bfloat16: two of its steps at the largest score.
        scores = np.where(allowed, results["scores"][..., :count], 0)
        close(scores, np.where(allowed, want, 0), 2.0**-6 * np.abs(want[allowed]).max())
    check_selection(results["topk"], want, rounded_model.config.index_topk)


def block_scores(scores, config):
    """[B, T, blocks]: the largest score in each block, and a huge one for the newest block, always a candidate."""
    size = config.candidate_block_size
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -scores.shape[-1] % size)), constant_values=-np.inf)
    best = padded.reshape(*padded.shape[:2], -1, size).max(-1)
    tokens = np.arange(best.shape[1])
    best[:, tokens, tokens // size] = 1e9
    return best


def check_selection(selected, scores, k):
    """Rounded scores tie: entries that score two steps of bfloat16 above the k-th best, and none below."""
    for mine, row in zip(selected.reshape(-1, k), scores.reshape(-1, scores.shape[-1]), strict=True):
        mine = {*mine[mine >= 0].tolist()}
        visible = np.isfinite(row).sum()
        assert len(mine) == min(k, visible)
        best = np.sort(row)[-min(k, visible)] if visible else 0.0
        tolerance = 2.0**-6 * 2.0 ** np.floor(np.log2(max(abs(best), 1e-30)))
        must = set(np.flatnonzero(row > best + tolerance).tolist())
        may = set(np.flatnonzero((row >= best - tolerance) & np.isfinite(row)).tolist())
        assert must <= mine <= may
