"""Engram against DeepSeek's code: token map, hashes, values, gates and streams; and quantized tables, on the host."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.newest_tokens import advance_ngrams
from dsv4_jax.common.safetensors_header import DTYPES, read_header
from dsv4_jax.config import DSV4Config, EngramConfig, LayerSpec
from dsv4_jax.config.engram_config import MAX_SIZE
from dsv4_jax.decode import forward
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM, Engram, parameter_views, shardings
from dsv4_jax.nn.engram import look_up
from dsv4_jax.nn.token_map import compressed_token_ids
from dsv4_jax.ops import hash_multipliers, ngram_rows
from dsv4_jax.parallel.mesh import make_mesh
from dsv4_jax.quant import QuantizedWeight
from tests.pallas_kernels.kernels import compile_in_process
from tests.paths import DATA


SETS = ("official_v41", "official_v41_fp8")
LAYERS = (1, 4)
# The tolerance of the set's README: noise of three implementations in float32 was 1.1e-6.
ATOL = 2e-5


def look_up_rows(module, ngrams):
    """The rows of a module's table for n-grams."""
    return look_up(module.embedding.get_value(), module.row_ids(ngrams))


class Golden:
    """One set: its configuration, as far as Engram needs it, arrays and weights."""

    def __init__(self, name):
        self.folder = DATA / name
        text = json.loads((self.folder / "config.json").read_text())["text_config"]
        fields = [field for field in EngramConfig.__dataclass_fields__]
        values = {field: text[f"engram_{field}"] for field in fields}
        engram = EngramConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        same = {name: text[name] for name in ("vocab_size", "hidden_size", "hc_mult", "rms_norm_eps")}
        self.config = DSV4Config.small((LayerSpec(),) * text["num_hidden_layers"], engram=engram, **same)
        self.arrays = np.load(self.folder / "golden.npz")
        self.multipliers = [hash_multipliers(engram, layer) for layer in engram.layer_ids]

    def __getitem__(self, name):
        return self.arrays[name]

    def ngrams(self, pad_id=None):
        """[B * T, n] compressed ids, by the definition."""
        rows = []
        token_map = self["token_map"]
        pad_id = token_map[self.config.engram.pad_token_id] if pad_id is None else pad_id
        for ids in self["ids"]:
            padded = [pad_id] * (self.config.engram.max_ngram_size - 1) + token_map[ids].tolist()
            rows += [padded[t : t + self.config.engram.max_ngram_size][::-1] for t in range(len(ids))]
        return jnp.asarray(rows, jnp.int32)

    def weight(self, name):
        for file in sorted(self.folder.glob("*.safetensors")):
            stored, _ = read_header(file)
            if name in stored:
                header, place = stored[name]
                content = np.fromfile(file, np.uint8)[place]
                return content.view(DTYPES[header.dtype]).reshape(header.shape)
        return None

    def engram(self, layer):
        """The module with the release's weights: a quantized table, the others in float32."""
        module = Engram(self.config, layer, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        parts = {
            name: self.weight(f"layers.{layer}.engram.{name}")
            for name in ("embed.weight", "embed.scale", "wkv.weight", "wkv.scale", "q_weight", "k_weight")
        }
        codes, scale = (parts[f"embed.{name}"].view(np.uint8) for name in ("weight", "scale"))
        module.embedding.set_value(QuantizedWeight(jnp.asarray(codes), jnp.asarray(scale), "FP8_ROWS", jnp.float32))
        wkv = parts["wkv.weight"].astype(np.float32)
        if parts["wkv.scale"] is not None:
            wkv = wkv * np.kron(parts["wkv.scale"].astype(np.float32), np.ones((32, 32), np.float32))
        assert module.kv_proj.weight.shape == wkv.shape
        module.kv_proj.weight.set_value(jnp.asarray(wkv))
        module.q_weight.set_value(jnp.asarray(parts["q_weight"], jnp.float32))
        module.k_weight.set_value(jnp.asarray(parts["k_weight"], jnp.float32))
        return module

    def at(self, layer):
        """(streams that enter Engram, n-grams, gates, values, streams that leave it), where the set has streams."""
        where = (slice(None), self["stream_at"])
        gate, value = (self[f"engram_{name}_{layer}"][where] for name in ("gate", "value"))
        after = self["streams"][layer]
        before = after - gate[..., None] * value[..., None, :]
        ngrams = self.ngrams().reshape(*self["ids"].shape, -1)[where]
        return tuple(jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (before, ngrams, gate, value, after))


@pytest.fixture(scope="module", params=SETS)
def golden(request):
    return Golden(request.param)


def test_the_token_map_is_the_releases(golden):
    tokenizer = Tokenizer.from_file(str(golden.folder / "tokenizer.json"))
    ids = compressed_token_ids(tokenizer, golden.config)
    np.testing.assert_array_equal(ids, golden["token_map"])
    assert ids.dtype == np.int32 and ids.max() + 1 == golden.config.engram.compressed_vocab_size


def byte_level(*names):
    vocab = {name: i for i, name in enumerate(names)}
    content = json.loads((DATA / "official_v41" / "tokenizer.json").read_text())
    content["model"] |= {"vocab": vocab, "merges": []}
    return Tokenizer.from_str(json.dumps(content))


def small(compressed=4, vocab=16, **fields):
    engram = EngramConfig(
        layer_ids=(1,), num_embeddings=(5 + 7,), max_ngram_size=2, vocab_size=5, n_heads=2, head_dim=32,
        pad_token_id=0, compressed_vocab_size=compressed,
    )  # fmt: skip
    return DSV4Config.small((LayerSpec(),) * 2, vocab_size=vocab, engram=engram, **fields)


def test_tokens_that_normalize_to_nothing_keep_their_text():
    accent = "Ìģ"  # a combining accent, which is stripped
    other = "ÌĢ"
    ids = compressed_token_ids(byte_level("a", accent, other, "Ġ", "ĠĠ", accent + "a"), small(4))
    assert ids[:6].tolist() == [0, 1, 2, 3, 3, 0] and not ids[6:].any()


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="gives 2 compressed ids.*engram_compressed_vocab_size=3: it is not"):
        compressed_token_ids(byte_level("a", "A", "b"), small(3))
    with pytest.raises(ValueError, match="has 3 ids, more than the model's vocab_size=2"):
        compressed_token_ids(byte_level("a", "A", "b"), small(2, vocab=2))


def test_multipliers_and_rows_are_the_releases(golden):
    assert np.array_equal(golden.multipliers, golden["engram_multipliers"])
    ngrams = golden.ngrams()
    for i, primes in enumerate(golden.config.engram.primes):
        np.testing.assert_array_equal(primes, golden["engram_primes"][i].reshape(-1))
        rows = jax.jit(lambda ids, m=golden.multipliers[i], p=primes: ngram_rows(ids, m, p))(ngrams)
        np.testing.assert_array_equal(rows, golden["engram_hash"][..., i, :].reshape(rows.shape))
        assert rows.dtype == jnp.int32


def test_rows_of_the_largest_primes():
    """All primes that a configuration may have are less than 2**24; with larger ones, 32 bits would overflow."""
    engram = EngramConfig(
        layer_ids=tuple(range(4)), num_embeddings=(), max_ngram_size=17, vocab_size=MAX_SIZE, n_heads=64, head_dim=1,
        pad_token_id=0, compressed_vocab_size=2,
    )  # fmt: skip
    largest = engram.primes[-1][-1]
    assert largest < 2**24
    a = 2**62 - 57
    b = 2**61 + 33
    rows = ngram_rows(jnp.asarray([[1, 0], [0, 1], [1, 1]], jnp.int32), (a, b), (largest,))
    assert rows[:, 0].tolist() == [x % largest for x in (a, b, a ^ b)]


def test_tables_of_more_rows_than_an_int32_counts_are_refused():
    engram = dataclasses.replace(DSV4Config.v41_flash().engram, n_heads=64)
    engram = dataclasses.replace(engram, num_embeddings=tuple(map(sum, engram.primes)))
    with pytest.raises(ValueError, match=r"engram_num_embeddings=\[307.*must be less than 2\*\*31"):
        engram.check(40, 129280)


def test_a_pad_id_that_is_not_mapped_gives_other_rows(golden):
    """The set can tell: the first tokens' rows."""
    pad_id = golden.config.engram.pad_token_id
    rows = ngram_rows(golden.ngrams(pad_id), golden.multipliers[0], golden.config.engram.primes[0])
    want = golden["engram_hash"][..., 0, :].reshape(rows.shape)
    assert (np.asarray(rows) != want).any(1).sum() == 3 * len(golden["ids"])


@pytest.mark.parametrize("layer", [1, 14])
def test_rows_at_the_released_size_are_those_of_exact_integers(layer):
    """Products reach 63 bits: arithmetic of 32 or 53 bits fails."""
    engram = DSV4Config.v41_flash().engram
    multipliers = hash_multipliers(engram, layer)
    primes = engram.primes[engram.layer_ids.index(layer)]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engram.compressed_vocab_size, (500, 4))
    ids[:2] = [[0] * 4, [engram.compressed_vocab_size - 1] * 4]
    want = np.zeros((len(ids), engram.rows), np.int64)
    for row, ngram in zip(want, ids.tolist(), strict=True):
        value = ngram[0] * multipliers[0]
        for k in range(1, 4):
            value ^= ngram[k] * multipliers[k]
            assert 0 <= value < 2**63
            columns = range((k - 1) * engram.n_heads, k * engram.n_heads)
            row[columns] = [value % primes[i] + sum(primes[:i]) for i in columns]
    assert all(multiplier % 2 for multiplier in multipliers)
    assert want.max() < engram.num_embeddings[engram.layer_ids.index(layer)]
    rows = jax.jit(lambda ids: ngram_rows(ids, multipliers, primes))(jnp.asarray(ids, jnp.int32))
    np.testing.assert_array_equal(rows, want)


@pytest.mark.parametrize("layer", LAYERS)
def test_values_are_the_releases(golden, layer):
    ngrams = golden.ngrams()
    streams = jnp.ones((len(ngrams), golden.config.hc_mult, golden.config.hidden_size))
    module = golden.engram(layer)
    _, value = module.gate_and_value(streams, look_up_rows(module, ngrams))
    want = golden[f"engram_value_{layer}"].reshape(value.shape)
    np.testing.assert_allclose(value, want, rtol=0, atol=ATOL)


def gates(golden, layer, change=lambda module: None):
    """(our gates, the release's)."""
    before, ngrams, gate, _, _ = golden.at(layer)
    module = golden.engram(layer)
    change(module)
    return np.asarray(module.gate_and_value(before, look_up_rows(module, ngrams))[0]), np.asarray(gate)


@pytest.mark.parametrize("layer", LAYERS)
def test_gates_and_streams_are_the_releases(golden, layer):
    have, want = gates(golden, layer)
    np.testing.assert_allclose(have, want, rtol=0, atol=ATOL)
    before, ngrams, _, _, after = golden.at(layer)
    module = golden.engram(layer)
    np.testing.assert_allclose(module(before, look_up_rows(module, ngrams)), after, rtol=0, atol=ATOL)


def test_the_weights_of_both_norms_count(golden):
    def forget_one(module):
        module.q_weight.set_value(jnp.ones_like(module.q_weight[...]))

    have, want = gates(golden, 1, forget_one)
    assert np.abs(have - want).max() > 100 * ATOL


def numpy_gate(streams, key, weight, eps):
    """The formula in float64."""
    streams, key, weight = (np.asarray(x, np.float64) for x in (streams, key, weight))
    norm = [x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) for x in (streams, key)]
    dot = (norm[0] * norm[1] * weight).sum(-1) / np.sqrt(streams.shape[-1])
    root = np.sqrt(np.maximum(np.abs(dot), 1e-6))
    return 1 / (1 + np.exp(-np.where(dot < 0, -root, root)))


def test_gates_near_zero_and_of_tiny_streams():
    """The gate jumps at 0, by the floor under the root; streams of 1e-8 are not lost in the norm's eps of 1e-20."""
    config = small(rms_norm_eps=1e-20)
    module = Engram(config, 1, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    ngrams = jnp.asarray([[1, 2], [3, 0], [2, 2]], jnp.int32)
    h = config.hc_mult
    hidden = config.hidden_size
    rows = look_up_rows(module, ngrams)
    key = module.kv_proj(rows.reshape(3, -1))[:, : h * hidden].reshape(3, h, hidden)
    weight = module.q_weight[...] * module.k_weight[...]
    rng = np.random.default_rng(1)
    streams = rng.normal(size=key.shape)
    # In the second token streams are orthogonal to keys, but for less than the floor, on either side.
    product = np.asarray(weight * key[1], np.float64)
    streams[1] -= product * ((streams[1] * product).sum(-1) / (product * product).sum(-1))[:, None]
    streams[1] += product * np.array([1, -1, 1, -1])[:h, None] * 1e-5
    streams[2] *= 1e-8
    streams = jnp.asarray(streams, jnp.float32)
    want = numpy_gate(streams, key, weight, 1e-20)
    assert ((want[1] > 0.5) == np.array([True, False, True, False])).all()
    np.testing.assert_allclose(np.abs(want[1] - 0.5), 2.5e-4, rtol=1e-2)
    gate, _ = module.gate_and_value(streams, rows)
    np.testing.assert_allclose(gate, want, rtol=0, atol=ATOL)


def random_table(rows=12, channels=64):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 0x7E, (rows, channels), np.uint8) | (rng.integers(0, 2, (rows, channels), np.uint8) << 7)
    return QuantizedWeight(
        jnp.asarray(codes),
        jnp.asarray(rng.integers(110, 140, (rows, channels // 32), np.uint8)),
        "FP8_ROWS",
        jnp.bfloat16,
    )


def dequantized(table):
    values = np.asarray(table.codes).view(jnp.float8_e4m3fn).astype(np.float32)
    return values * np.repeat(2.0 ** (np.asarray(table.scale).astype(np.float32) - 127), 32, axis=1)


ROWS = jnp.asarray([[0, 11], [5, 5]], jnp.int32)


def test_only_rows_of_a_quantized_table_are_dequantized():
    table = random_table()
    np.testing.assert_array_equal(look_up(table, ROWS).astype(jnp.float32), dequantized(table)[np.asarray(ROWS)])
    stack = jax.tree.map(lambda x: x[None], table)
    np.testing.assert_array_equal(look_up(stack, ROWS), look_up(table, ROWS))
    big = jax.eval_shape(lambda: random_table(1 << 12))
    memory = jax.jit(look_up).lower(big, ROWS).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 14


def test_gradients_reach_every_parameter():
    module = Engram(small(), 1, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    streams = jax.random.normal(jax.random.key(0), (3, 4, module.config.hidden_size))
    ngrams = jnp.asarray([[1, 2], [3, 0], [2, 2]], jnp.int32)
    grads = nnx.grad(lambda module: jnp.sum(module(streams, look_up_rows(module, ngrams)) ** 2))(module)
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all() and np.abs(grad[...]).max() > 0, path


def test_activations_in_bfloat16_are_rounded_once():
    module = Engram(small(), 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    streams = jax.random.normal(jax.random.key(0), (3, 4, module.config.hidden_size), jnp.bfloat16)
    ngrams = jnp.asarray([[1, 2], [3, 0], [2, 2]], jnp.int32)
    rows = look_up_rows(module, ngrams)
    gate, value = module.gate_and_value(streams, rows)
    assert gate.dtype == jnp.float32 and value.dtype == jnp.bfloat16
    added = np.asarray(gate)[:, :, None] * np.asarray(value.astype(jnp.float32))[:, None]
    want = np.asarray(streams.astype(jnp.float32)) + added
    np.testing.assert_array_equal(module(streams, rows), jnp.asarray(want).astype(jnp.bfloat16))


def two_tables():
    """A model of equal layers, two of which have Engram with tables of different sizes."""
    engram = EngramConfig(
        layer_ids=(1, 2), num_embeddings=(61 + 67 + 71, 73 + 79 + 83), max_ngram_size=4, vocab_size=61, n_heads=1,
        head_dim=32, pad_token_id=2, compressed_vocab_size=100,
    )  # fmt: skip
    config = DSV4Config.small((LayerSpec(),) * 3, engram=engram)
    model = DeepseekV4ForCausalLM(config, jnp.float32)
    # With usual weights of random models, embeddings are too small to be seen.
    for layer in (1, 2):
        path = f"model.layers.{layer}.engram.embedding"
        view = parameter_views(model)[path]
        view.set_value(50 * view.read())
    return model


def run_in_chunks(model, ids, chunks, mesh=None):
    """Hidden states of all tokens of one request."""
    manager = KVCacheManager(
        model.config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16, kv_format="plain",
        dtype=jnp.float32, max_query_tokens=2, mesh=mesh,
    )  # fmt: skip
    cache = manager.init_cache()
    slot = manager.admit()
    hidden = []
    for count in chunks:
        batch = manager.prepare_forward({slot: ids[:count]}, prefill_size=32)
        out, cache = forward(model, cache, batch)
        hidden += list(np.asarray(out)[np.asarray(batch.slots) == slot])
        ids = ids[count:]
    return np.stack(hidden)


@pytest.fixture(scope="module")
def whole():
    """(model, ids, hidden states after a single prefill)."""
    model = two_tables()
    ids = np.random.default_rng(3).integers(0, 256, 24).tolist()
    return model, ids, run_in_chunks(model, ids, [24])


def test_any_chunks_of_a_prompt_give_the_same_hidden_states(whole):
    """Layer 2's table is another one than layer 1's; n-grams reach across chunks."""
    model, ids, hidden = whole
    np.testing.assert_allclose(run_in_chunks(model, ids, [1, 4, 1, 1, 17]), hidden, rtol=0, atol=ATOL)
    other = run_in_chunks(model, [ids[0], ids[1] + 1, *ids[2:]], [24])
    assert np.abs(other - hidden)[5].max() > 1e-3


def test_padding_reaches_no_hash_and_no_ring(whole):
    """Whatever token ids padding has, negative ones too: n-grams of tokens stay, and nothing is stored for padding."""
    model, ids, _ = whole
    token_map = model.model.token_map.get_value()
    manager = KVCacheManager(model.config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16)
    batch = manager.prepare_forward({manager.admit(): ids[:5]}, prefill_size=8)
    cache = manager.init_cache()
    expected, stored = advance_ngrams(cache, batch, token_map)
    for filler in (-1, 7):
        padded = dataclasses.replace(batch, token_ids=jnp.where(batch.slots >= 0, batch.token_ids, filler))
        ngrams, after = advance_ngrams(cache, padded, token_map)
        assert (ngrams[:5] == expected[:5]).all() and (ngrams >= 0).all()
        assert (after.ngram_ids == stored.ngram_ids).all()


def looked_back(ids, is_image, size, pad_id):
    """[T, size] compressed ids by the definition of DeepSeek's code: from a part of an image back, all are the pad."""
    rows = []
    for t in range(len(ids)):
        row = []
        for source in range(t, t - size, -1):
            ended = source < 0 or is_image[source] or (row and row[-1] is None)
            row.append(None if ended else ids[source])
        rows.append([pad_id if number is None else number for number in row])
    return rows


@pytest.mark.parametrize("chunks", [[20], [3, 1, 1, 5, 10]])
def test_no_n_gram_goes_past_an_image(whole, chunks):
    """Nor do those of later steps, in which all tokens are text."""
    model, ids, _ = whole
    engram = model.config.engram
    token_map = model.model.token_map.get_value()
    is_image = np.isin(np.arange(20), [2, 3, 4, 9])
    compressed = np.asarray(token_map)[np.asarray(ids[:20])]
    expected = looked_back(compressed, is_image, engram.max_ngram_size, token_map[engram.pad_token_id])
    manager = KVCacheManager(model.config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16)
    cache = manager.init_cache()
    slot = manager.admit()
    begin = 0
    for count in chunks:
        batch = manager.prepare_forward({slot: ids[begin : begin + count]}, prefill_size=20)
        flags = np.pad(is_image[begin : begin + count], (0, len(batch.slots) - count))
        batch = dataclasses.replace(batch, is_image=jnp.asarray(flags) if flags.any() else None)
        ngrams, cache = advance_ngrams(cache, batch, token_map)
        np.testing.assert_array_equal(ngrams[:count], expected[begin : begin + count])
        begin += count


def test_nothing_is_added_to_parts_of_images():
    golden = Golden(SETS[0])
    module = golden.engram(LAYERS[0])
    streams, ngrams, *_ = golden.at(LAYERS[0])
    is_image = jnp.arange(len(streams)) % 2 == 0
    rows = look_up_rows(module, ngrams)
    after = module(streams, rows, is_image)
    np.testing.assert_array_equal(after[is_image], streams[is_image])
    np.testing.assert_array_equal(after[~is_image], module(streams, rows)[~is_image])
    assert (after[~is_image] != streams[~is_image]).any()


def test_a_model_on_a_mesh_gives_the_same(whole):
    model, ids, hidden = whole
    mesh = make_mesh({"model": 2})
    sharded = jax.device_put(model, shardings(model, mesh))
    np.testing.assert_allclose(run_in_chunks(sharded, ids, [24], mesh), hidden, rtol=0, atol=ATOL)


def replace_tables(model, function):
    """A copy of the model with other tables."""
    model = nnx.clone(model)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "embedding":
            variable.set_value(function(variable.get_value()))
    return model


def test_a_step_copies_no_table(whole):
    rows = 1 << 20
    codes, scale = (jax.ShapeDtypeStruct((1, rows, width), jnp.uint8) for width in (32, 1))
    model = replace_tables(whole[0], lambda _: QuantizedWeight(codes, scale, "FP8_ROWS", jnp.float32))
    manager = KVCacheManager(
        model.config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16, dtype=jnp.float32
    )
    batch = manager.prepare_forward({manager.admit(): [1, 2, 3]})
    step = jax.jit(lambda *args: forward.__wrapped__(*args))
    compiled = step.lower(model, KVCache.abstract(manager.schema), batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_run_while_gpus_look_up_rows(devices):
    """In the order in which XLA launches operations, other layers are between the start and the end of a look-up."""
    compile_in_process(
        f"devices = {devices}"
        + """
import re
import jax
from jax.sharding import NamedSharding, PartitionSpec
from dsv4_jax import ops
from dsv4_jax.bench.layer_slices import slice_config
from dsv4_jax.checkpoint.random_weights import abstract_model
from dsv4_jax.cache import KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import forward
from dsv4_jax.host import KVCacheManager
from tests.pallas_kernels.h100 import h100_mesh
config = slice_config(DSV4Config.v41_flash(), (0, 1, 2, 3, 4, 14))  # layers 1 and 14 have Engram, 3 and 4 are a loop
manager = KVCacheManager(config, num_blocks=64, max_requests=1, max_context=4096)
batch = manager.prepare_forward({manager.admit(): [0]})
step = forward.__wrapped__
if devices == 1:
    compile_step = lambda *args: compile_for_h100("step", step, *args, donate_argnums=1)
    mesh = None
else:
    compile_step = lambda *args: jax.jit(step, donate_argnums=1).lower(*args).compile()
    mesh = h100_mesh(devices)
    replicated = NamedSharding(mesh, PartitionSpec())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), batch)
with ops.use_implementation("mosaic_gpu"):
    compiled = compile_step(abstract_model(config, mesh), KVCache.abstract(manager.schema, mesh), batch)
assert compiled.memory_analysis().temp_size_in_bytes < 1 << 26  # no table is copied
text = compiled.as_text()
assert "is_scheduled=true" in text
lines = text[text.index("ENTRY"):].splitlines()
starts = {line.split()[0]: i for i, line in enumerate(lines) if " call-start(" in line}
ends = {i: line for i, line in enumerate(lines) if " call-done(" in line and '_xla_stream_annotation="1"' in line}
pairs = [(starts[re.search(r"call-done\\((%[^ ,)]+)\\)", line)[1]], i) for i, line in ends.items()]
(start_1, end_1), (start_14, end_14) = sorted(pairs, key=lambda pair: pair[1])
(loop,) = (i for i, line in enumerate(lines) if " while(" in line)
assert max(start_1, start_14) < end_1 < loop < end_14, (pairs, loop)
kernels = [i for i, line in enumerate(lines) if 'custom_call_target="mosaic_gpu' in line]
assert sum(max(start_1, start_14) < i < end_1 for i in kernels) > 4, (pairs, kernels)  # those of layer 0
assert not any(loop < i < end_14 for i in kernels), (pairs, kernels)
if devices == 1:  # pairs that are interleaved would divide the step's CUDA graph
    assert start_14 < start_1, pairs
"""
    )
