"""A model that is cut over the "model" axis makes the tokens and the cache that it makes on one device."""

import dataclasses
import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import AxisType

from dsv4_jax import decode
from dsv4_jax.bench.random_steps import RandomSteps
from dsv4_jax.cache import KVCache, pools
from dsv4_jax.checkpoint.random_weights import abstract_model, random_model
from dsv4_jax.config import DSV4Config, LayerSpec, shared_specs
from dsv4_jax.decode import CompiledModel, decode_step, forward, sample_step
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import parameter_views, shardings
from dsv4_jax.nn.block import RECORDED
from dsv4_jax.ops import all_gather, all_reduce, dispatch, model_index, use_implementation
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes
from dsv4_jax.parallel.mesh import check_mesh, check_shardable, make_mesh, parse_mesh
from tests.decode.bigram import MODEL as BIGRAM
from tests.host.managers import CONFIG, make, random_cache
from tests.ops.pools import same_bytes
from tests.pallas_kernels.kernels import compile_in_process
from tests.parallel.conftest import run_engine
from tests.paths import PACKAGED


def sharded_step(model, devices):
    mesh = make_mesh({"model": devices})
    return jax.device_put(model, shardings(model, mesh)), mesh


@pytest.mark.slow
def test_tokens_and_cache_are_those_of_one_device(model, alone):
    devices = 8
    cut, mesh = sharded_step(model, devices)
    layer = cut.model.layers[1]
    parts = {
        name: parameter.get_value().addressable_shards[0].data.shape
        for name, parameter in dict(
            queries=layer.self_attn.latent_projections.weights["q_b_proj"],
            o_a=layer.self_attn.o_a_proj.weight,
            o_b=layer.self_attn.o_b_proj.weight,
            sinks=layer.self_attn.sinks,
            gate_up=layer.mlp.experts.gate_up_proj,
            down=layer.mlp.experts.down_proj,
            shared=layer.mlp.shared_experts.gate_up_proj.weights["gate_proj+up_proj"],
            embedding=cut.model.embed_tokens.weight,
            keys=layer.self_attn.input_projections.weights["kv_proj"],
        ).items()
    }
    n = devices
    assert parts == dict(
        queries=(768 // n, 24),
        o_a=(128 // n, 96),
        o_b=(64, 128 // n),
        sinks=(8 // n,),
        gate_up=(8, 2, 32 // n, 64),
        down=(8, 64, 32 // n),
        shared=(2, 32 // n, 64),
        embedding=(160 // n, 64),
        keys=(96, 64),
    )
    tokens, cache, programs = run_engine(cut, model.config, mesh)
    assert (tokens, programs) == (alone[0], 1)
    assert all(x.sharding.is_fully_replicated and len(x.devices()) == devices for x in jax.tree.leaves(cache))
    for x in jax.tree.leaves(cache):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        assert all(first.tobytes() == other.tobytes() for other in others)
    one = jax.tree.map(np.asarray, alone[1])
    same_bytes((cache.lengths, cache.block_table), (one.lengths, one.block_table))
    # Nothing but the embedding is summed over devices before the first layer's rows, and of its terms one is not zero.
    same_bytes(jax.tree.map(lambda x: np.asarray(x)[0], cache.swa), jax.tree.map(lambda x: x[0], one.swa))
    for name, group in one.groups.items():
        # float32 sums in other orders are 1e-6 apart. Where that takes a value of a row that is read again to the next
        # FP8 code, that value, one of 96 in one of 8 rows and more, changes by a sixteenth.
        chex.assert_trees_all_close(cache.groups[name].state.kv, group.state.kv, rtol=0, atol=1e-3)
        different = np.asarray(cache.groups[name].entries.nope) != group.entries.nope
        assert np.mean(different) < 0.01


def test_a_reduction_is_rounded_once_and_equal_everywhere():
    mesh = make_mesh({"model": 8})
    x = np.random.default_rng(0).normal(size=(8, 3, 64)).astype(jnp.bfloat16)

    def local(x):
        total = all_reduce(x[0])
        return total[None], all_gather(x[0]), jnp.full((1,), model_index())

    specs = jax.P("model"), jax.P(), jax.P("model")
    parts = jax.device_put(x, jax.NamedSharding(mesh, specs[0]))
    total, fused, index = jax.shard_map(local, mesh=mesh, out_specs=specs, check_vma=False)(parts)
    total = np.asarray(total)
    assert all(part.tobytes() == total[0].tobytes() for part in total)
    # bfloat16 of a float32 sum in any order: next to that of the float64 sum, where that lies between two.
    want = x.astype(np.float64).sum(axis=0)
    chex.assert_trees_all_close(total[0].astype(np.float64), want, rtol=2**-8, atol=1e-6)
    assert np.mean(total[0] == want.astype(jnp.bfloat16)) > 0.99
    chex.assert_trees_all_equal(fused, np.concatenate(x, axis=1))
    chex.assert_trees_all_equal(index, np.arange(8))


@pytest.mark.parametrize("model", ["v4", "v41"], indirect=True)
def test_many_tokens_are_divided_among_devices_between_blocks(model, monkeypatch):
    """All values of a step are those of one device."""
    monkeypatch.setattr(sys.modules[all_reduce.__module__], "MAX_VALUES", 0)

    def run(model, mesh):
        manager = KVCacheManager(
            model.config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16, dtype=jnp.float32, mesh=mesh
        )
        tokens = {manager.admit(): list(range(n, 2 * n)) for n in (21, 10)}
        arguments = model, manager.init_cache(), manager.prepare_forward(tokens, prefill_size=32)

        @decode.sharded_step
        def step(model, cache, batch):
            hidden, streams, recorded, cache = model.model(cache, batch, record=RECORDED)
            values = [{name: value.swapaxes(0, 1) for name, value in values.items()} for _, values in recorded]
            return model.logits(hidden), streams, values, cache

        traced = jax.jit(step).trace(*arguments)
        *outputs, _ = traced.lower().compile()(*arguments)
        return jax.tree.map(lambda x: x[:31], jax.device_get(outputs)), str(traced.jaxpr)

    alone, _ = run(model, None)
    divided, jaxpr = run(*sharded_step(model, 4))
    # Two a layer, and a third that is recorded; of the embedding, and of the zeros with which the residual begins.
    assert jaxpr.count(" all_to_all[") == 3 * len(model.model.layers) + 2
    # Sums over devices have another order. That may take a value to the next code of FP8 or FP4, which is read again.
    chex.assert_trees_all_close(divided, alone, rtol=0, atol=1e-3)


def test_without_a_mesh_nothing_is_added():
    jaxpr = jax.make_jaxpr(lambda x: all_gather(all_reduce(x)) + model_index())(jnp.ones(3))
    assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["add"]


def test_a_step_takes_no_transfers_and_keeps_the_cache_in_place():
    mesh = make_mesh({"model": 2})
    manager = make(mesh=mesh)
    model = jax.device_put(BIGRAM, jax.NamedSharding(mesh, jax.P()))
    cache = manager.init_cache()
    slot = manager.admit()
    for _ in range(2):
        batch = manager.prepare_forward({slot: [3]})
        old = cache
        with jax.transfer_guard("disallow"):
            logits, cache = forward(model, cache, batch)
        chex.assert_trees_all_equal(logits[0], BIGRAM.table[3])
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        assert jax.tree.map(lambda x: x.sharding, cache) == cache.shardings(mesh)


def test_model_and_cache_must_lie_on_one_mesh():
    mesh = make_mesh({"model": 2})
    one = make()
    two = make(mesh=mesh)
    placed = jax.device_put(BIGRAM, jax.NamedSharding(mesh, jax.P()))
    for model, manager, lies in (
        (BIGRAM, two, r"no mesh .* a mesh of {'model': 2}"),
        (placed, one, "{'model': 2} and"),
    ):
        cache = manager.init_cache()
        slot = manager.admit()
        with pytest.raises(ValueError, match=f"{lies}.*give load_checkpoint and KVCacheManager the same mesh"):
            forward(model, cache, manager.prepare_forward({slot: [3]}))
        assert not cache.lengths.is_deleted()


def test_maps_that_are_cut_alike_share_a_matrix(model):
    """The shared expert's two, on each device its rows of both; queries, which are cut, not with what is copied."""
    cut, mesh = sharded_step(model, 4)
    whole = model.model.layers[1].mlp.shared_experts
    mlp = cut.model.layers[1].mlp.shared_experts
    (matrix,) = mlp.gate_up_proj.weights.values()
    for shard in matrix.get_value().addressable_shards:
        assert shard.data.shape == (2, 8, 64)
        for number, name in enumerate(("gate_proj", "up_proj")):
            chex.assert_trees_all_equal(shard.data[number], whole.gate_up_proj.matrix(name)[shard.index[1]])
    queries = cut.model.layers[1].self_attn.latent_projections
    assert queries.groups == (("q_b_proj",), ("indexer_q_b_proj",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)

    @jax.jit
    def apply(mlp, x):
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, mlp)
        return jax.shard_map(
            lambda mlp, x: all_reduce(mlp(x)), mesh=mesh, in_specs=(specs, jax.P()), out_specs=jax.P(), check_vma=False
        )(mlp, x)

    # Four float32 sums are added in another order.
    chex.assert_trees_all_close(apply(mlp, x), whole(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["self_attn.o_b_proj.weight", "self_attn.input_projections.weights.kv_proj", "mlp.experts.down_proj"],
)
def test_a_view_writes_a_sharded_parameter(model, name):
    cut, _ = sharded_step(jax.tree.map(jnp.copy, model), 2)  # `set_value` donates arrays, which may alias the model's
    view = parameter_views(cut)[f"model.layers.1.{name}"]
    where = view.variable.get_value().sharding
    new = np.asarray(view.read()) + 1
    view.set_value(jnp.asarray(new))
    assert view.variable.get_value().sharding == where
    np.testing.assert_array_equal(view.read(), new)


def test_sizes_that_a_mesh_does_not_divide():
    config = DSV4Config.from_hf(PACKAGED)
    check_shardable(config, {"model": 2})
    with pytest.raises(ValueError, match=r"model=4 does not divide o_groups=2, vocab_size=258; this model takes 1, 2$"):
        check_shardable(config, {"model": 4})
    with pytest.raises(ValueError, match="model=8 does not divide num_attention_heads=4"):
        KVCacheManager(config, num_blocks=4, max_context=128, mesh=make_mesh({"model": 8}))
    check_shardable(DSV4Config.v4_flash(), {"model": 8})


@pytest.mark.parametrize("text", ["", "4", "model", "model=0", "model=x", "model=2,model=2", "heads=2", "model=-1"])
def test_what_is_no_mesh(text):
    with pytest.raises(ValueError, match=re.escape(f"mesh {text!r} must be AXIS=DEVICES")):
        parse_mesh(text)


def test_meshes_of_devices_that_are_not_there():
    assert parse_mesh(" model = 4 ") == {"model": 4}
    assert dict(make_mesh({"model": 4}).shape) == {"model": 4}
    with pytest.raises(ValueError, match=r"mesh model=99 needs 99 devices, there are \d+ \(cpu\)"):
        make_mesh({"model": 99})
    with pytest.raises(ValueError, match=r"axes \['tensor'\]; known: data, model"):
        check_mesh(jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]))
    auto = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"must be Explicit: make it with jax\.make_mesh\(\(2,\), \('model',\)\)"):
        check_mesh(auto)


def test_programs_are_those_of_one_device_where_there_is_no_mesh():
    manager = make()
    cache = manager.init_cache()
    slot = manager.admit()
    jaxpr = str(forward.trace(BIGRAM, cache, manager.prepare_forward({slot: [3]})).jaxpr)
    assert "shard_map" not in jaxpr


@pytest.mark.slow
def test_requests_move_within_a_mesh_as_on_one_device():
    """Preempted, resumed, forked and found in a prefix cache: the same tokens, and the same bytes on all devices."""
    tokens = []
    caches = []
    config = dataclasses.replace(CONFIG, num_attention_heads=8, o_groups=8)
    for mesh in (None, make_mesh({"model": 8})):
        manager = make(config, num_blocks=8, mesh=mesh)
        # A copy: the cache itself is known to be another manager's.
        model = BIGRAM
        cache = jax.tree.map(jnp.copy, random_cache(make(config, num_blocks=8)))
        if mesh is not None:
            model = jax.device_put(BIGRAM, jax.NamedSharding(mesh, jax.P()))
            cache = jax.device_put(cache, cache.shardings(mesh))
        engine = Engine(model, manager, cache, token_budget=24, prefix=PrefixCache(manager, key="bigram"))
        requests = [engine.add(range(n, 2 * n), max_new_tokens=30, priority=n % 2) for n in (40, 33, 40, 17, 30)]
        for _ in range(12):
            engine.step()
        requests += engine.fork(engine.running[0], [1])
        while engine.busy:
            engine.step()
        assert engine.metrics.preemptions and engine.metrics.prefix.hit_tokens
        tokens.append([request.generated for request in requests])
        caches.append(engine.cache)
    assert tokens[0] == tokens[1]
    same_bytes(*(jax.tree.map(np.asarray, cache) for cache in caches))


@pytest.mark.parametrize(("model", "layers", "gathers"), [("v4", 3, 1), ("v41", 5, 2)], indirect=["model"])
def test_a_step_has_two_reductions_a_layer(model, layers, gathers):
    mesh = make_mesh({"model": 8})
    abstract = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), model, shardings(model, mesh)
    )
    manager = KVCacheManager(
        model.config, num_blocks=4, max_requests=2, max_context=64, block_tokens=16, dtype=jnp.float32, mesh=mesh
    )
    batch = manager.prepare_forward({manager.admit(): [1]})
    text = str(forward.trace(abstract, KVCache.abstract(manager.schema, mesh), batch).jaxpr)
    # And one of the embedding, and of the zeros with which the residual begins. XLA adds up what it has gathered. The
    # parts of the head and of Engram are gathered, too.
    assert (text.count(" psum["), text.count(" all_gather[")) == (0, 2 * layers + 2 + gathers)


FLASH = DSV4Config.v4_flash().with_layers([LayerSpec(), LayerSpec.csa(), LayerSpec.hca()], ["hash_moe", "moe", "moe"])
# A window only, also with Engram; entries of 2 tokens; entries of 1 token, and candidates; a selection among these, and
# the same selection again.
V41_FLASH = DSV4Config.v41_flash().with_layers(shared_specs((0, 0, 2, 1, 1, 1), (2, 3), (2, 3, 4), 3))


PRO = DSV4Config.v4_pro().with_layers([LayerSpec.hca(), LayerSpec.csa()], ["hash_moe", "moe"])
# An eighth of the head's 129,280 rows. XLA multiplies them.
HEAD = {("linear", "the kernel takes outputs of a multiple of 64 rows, got [16160]")}
# An eighth of the 2,304 channels of an expert, and of V4.1's shared expert.
SHARED = {
    ("linear", "the kernel takes columns in multiples of 64, got 288"),
    ("linear_swiglu", "the kernel takes outputs of a multiple of 64 rows, got [288, 288]"),
}
# An eighth of the 3,072 channels of V4-Pro's shared expert.
PRO_SHARED = {("linear", "the kernel takes columns in multiples of 256, got 384")}
EXPERTS = {("experts", "the kernel takes channels of an expert in multiples of 64, got 288")}


@pytest.mark.parametrize(
    ("config", "max_context", "devices", "expert_parallel", "gathers", "by_xla"),
    [
        pytest.param(FLASH, 1024, 4, False, 2, set(), id="v4_flash"),
        pytest.param(FLASH, 1024, 8, False, 2, HEAD, id="v4_flash on 8", marks=pytest.mark.slow),
        pytest.param(PRO, 1 << 20, 8, False, 2, HEAD | PRO_SHARED, id="v4_pro"),
        pytest.param(PRO, 1 << 20, 8, True, 2, HEAD | PRO_SHARED, id="v4_pro, whole experts", marks=pytest.mark.slow),
        pytest.param(V41_FLASH, 1 << 16, 4, False, 3, set(), id="v41_flash"),  # so long that only candidates are scored
        pytest.param(
            V41_FLASH, 1 << 16, 8, False, 3, HEAD | SHARED | EXPERTS, id="v41_flash on 8", marks=pytest.mark.slow
        ),
        pytest.param(
            V41_FLASH, 1 << 16, 8, True, 3, HEAD | SHARED, id="v41_flash, whole experts", marks=pytest.mark.slow
        ),
    ],
)
def test_kernels_take_the_shards_of_releases(
    monkeypatch, config, max_context, devices, expert_parallel, gathers, by_xla
):
    """The shards of a release's layers have shapes that kernels take, except those in `by_xla`."""
    mesh = make_mesh({"model": devices})
    manager = KVCacheManager(config, num_blocks=64, max_requests=8, max_context=max_context, mesh=mesh)
    table = jax.ShapeDtypeStruct((devices, 4), jnp.uint32, sharding=mailbox_sharding(mesh))
    cache = dataclasses.replace(KVCache.abstract(manager.schema, mesh), mailboxes=table)
    batch = manager.prepare_forward({manager.admit(): [1]})
    reasons = set()
    monkeypatch.setattr(dispatch, "_report", lambda op, reason, level: reasons.add((op, reason)))
    with use_implementation("mosaic_gpu"):
        model = CompiledModel(abstract_model(config, mesh, expert_parallel=expert_parallel))
        for step in (decode_step, sample_step):  # the second finds the model traced, and takes its own mailboxes
            traced = step.trace(model, cache, batch)
            assert not any(isinstance(x, jax.core.Tracer) for x in traced._consts)
    assert reasons == by_xla
    # The devices tell each other their mailboxes' addresses once, and gather the logits and Engram's rows; their sums
    # are kernels: two a layer, of the embedding, and of the zeros with which the residual begins.
    text = str(traced.jaxpr)
    sums = 2 * config.num_hidden_layers + 2
    assert (text.count(" psum["), text.count(" all_gather["), text.count("jaxpr=all_reduce]")) == (0, gathers, sums)


def test_addresses_of_mailboxes_stay_with_the_cache(monkeypatch):
    """As on GPUs, of a mesh of CPU devices, whose steps only pass the table on."""
    mesh = make_mesh({"model": 2})
    table = jax.device_put(np.arange(8, dtype=np.uint32).reshape(2, 4), mailbox_sharding(mesh))
    monkeypatch.setattr("dsv4_jax.cache.pools.make_mailboxes", lambda mesh: table.copy())
    manager = make(mesh=mesh)
    model = jax.device_put(BIGRAM, jax.NamedSharding(mesh, jax.P()))
    cache = manager.init_cache()
    slot = manager.admit()
    for _ in range(2):
        logits, cache = forward(model, cache, manager.prepare_forward({slot: [3]}))
        chex.assert_trees_all_equal(logits[0], BIGRAM.table[3])
    assert jax.tree.map(lambda x: x.sharding, cache) == cache.shardings(mesh)
    # Addresses of one process are nothing to store.
    data = serialization.to_bytes(dataclasses.replace(cache, mailboxes=None))
    assert serialization.to_bytes(cache) == data
    back = serialization.from_bytes(cache, data)
    chex.assert_trees_all_equal(back.mailboxes, table)
    same_bytes(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, cache))


@pytest.mark.aot
def test_a_step_of_two_gpus_adds_up_through_mailboxes_in_place():
    text = compile_in_process("""
import dataclasses, jax, jax.numpy as jnp
from dsv4_jax.checkpoint.random_weights import abstract_model
from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.config import DSV4Config, LayerSpec, shared_specs
from dsv4_jax.decode import CompiledModel, sample_step
from dsv4_jax.ops import use_implementation
from dsv4_jax.parallel.mailboxes import mailbox_sharding
from tests.pallas_kernels.h100 import h100_mesh
mesh = h100_mesh(2)
config = DSV4Config.v4_flash().with_layers([LayerSpec.hca()])
schema = CacheSchema(config, num_blocks=512, max_requests=8, max_context=65536)
table = jax.ShapeDtypeStruct((2, 4), jnp.uint32, sharding=mailbox_sharding(mesh))
cache = dataclasses.replace(KVCache.abstract(schema, mesh), mailboxes=table)
def ints(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))
leaves = jax.tree.leaves_with_path(cache)
for n in 1, 8:
    batch = Batch(ints(n), ints(n), ints(n), ints(n, 3), ints(8), prefill=False)
    with use_implementation("mosaic_gpu"):
        args = CompiledModel(abstract_model(config, mesh)), cache, batch
        text = sample_step.trace(*args).lower().compile().as_text()
    print("cache", len(leaves), "aliased", text.split("entry_computation_layout")[0].count("-alias)"))
    print(n, "requests: sums", text.count('all_reduce/mpmd_map"'), "by XLA", text.count(" all-reduce"))
""")
    for cache, aliased in re.findall(r"cache (\d+) aliased (\d+)", text):
        assert cache == aliased
    # Of few tokens the hyper-connections' kernel adds up. The embedding's sum is left, which XLA's text has twice. Of
    # more tokens there are two sums of the layer and those of the embedding and of the residual's first zeros.
    assert "1 requests: sums 2 by XLA 0" in text and "8 requests: sums 4 by XLA 0" in text


@pytest.mark.gpu
def test_a_whole_layer_on_two_gpus(monkeypatch):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    mesh = make_mesh({"model": 2})
    flash = DSV4Config.v4_flash()
    config = flash.with_layers([LayerSpec.hca()])
    model = CompiledModel(random_model(config, mesh))

    def outputs_with(mailboxes):
        monkeypatch.setattr(pools, "make_mailboxes", make_mailboxes if mailboxes else lambda mesh: None)
        manager = KVCacheManager(config, num_blocks=8, max_requests=1, max_context=1024, mesh=mesh)
        steps = RandomSteps(model, manager, 1)
        steps.start_requests(300)
        outputs = [steps.step(steps.batch()) for _ in range(3)]
        return [*outputs, steps.loop(steps.batch(reserve=31), 32)]

    found = outputs_with(True)
    for array in jax.tree.leaves(found):
        parts = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert parts[0].tobytes() == parts[1].tobytes() and np.all(np.isfinite(parts[0]))
    # Of two values there is only one sum, so all steps have the same bits.
    same_bytes(found, outputs_with(False))
