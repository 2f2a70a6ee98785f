"""`dsv4-jax bench step` where there is no GPU: a tiny model's steps."""

import contextlib
import dataclasses
import json
import types
import unittest.mock

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dsv4_jax.bench import attention_stack, decode_steps, plots, timing
from dsv4_jax.bench.attention_stack import DRAWS, AttentionLayer, AttentionStack, StackDecoder, random_cache
from dsv4_jax.bench.cases import small_config, tree_bytes
from dsv4_jax.bench.decode_steps import STEPS, StepCase, StepOptions
from dsv4_jax.bench.model_stack import abstract_stack
from dsv4_jax.bench.tables import LiveTable, step_cells
from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import make_drafts
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.parallel.mesh import make_mesh
from dsv4_jax.quant import kv_format
from tests.host.managers import CONFIG


def test_measures_and_writes_json_and_a_picture(run, tmp_path):
    table, picture = tmp_path / "steps.json", tmp_path / "steps.png"
    out = run(
        "bench", "step", "--batches", 2, "--contexts", 256, 512, "--layers", 3, "--json", table, "--plot", picture
    )
    assert "Attention layers of a tiny model: 3" in out
    report = json.loads(table.read_text())
    assert report["shapes"] == "tiny"
    rows = report["results"]
    assert [(row["requests"], row["context"]) for row in rows] == [(2, 256), (2, 512)]
    for row in rows:
        assert 0 < row["dispatch_milliseconds"] < row["milliseconds"] * 2
        assert row["loop_milliseconds"] > 0
        ratio = 100 * row["floor_milliseconds"] / row["milliseconds"]
        assert row["percent_of_floor"] == pytest.approx(ratio, rel=0.05)
    # 256 more tokens for two requests: 64 indexer keys of 34 bytes, as many entries of 200, and 2 of the HCA layer.
    assert rows[1]["floor_bytes"] - rows[0]["floor_bytes"] == 2 * (64 * 34 + 64 * 200 + 2 * 200)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_mesh_halves_what_a_device_reads(run, tmp_path):
    """Four devices: one of two requests, half of the heads' maps each."""
    floors = []
    for options in (["--batches", 1], ["--batches", 2, "--mesh", "data=2,model=2"]):
        file = tmp_path / f"{len(options)}.json"
        run("bench", "step", "--contexts", 256, "--layers", 1, "--json", file, *options)
        report = json.loads(file.read_text())
        floors.append(report["results"][0]["floor_bytes"])
    assert report["mesh"] == {"data": 2, "model": 2}
    # Queries 640 x 128, groups 2 * 128 x 320 and output 256 x 256 in bfloat16, and four float32 sinks.
    assert floors[0] - floors[1] == (640 * 128 + 256 * 320 + 256 * 256) * 2 // 2 + 4 * 4 // 2


def test_a_stack_in_the_releases_storage_is_cut_by_whole_blocks():
    config = DSV4Config.v4_flash().with_layers(DSV4Config.v4_flash().specs[:3])
    whole, part = (tree_bytes(nnx.state(abstract_stack(config, mesh))) for mesh in (None, make_mesh({"model": 8})))
    assert 0.125 < part / whole < 0.15  # experts are nearly all
    assert tree_bytes(nnx.state(abstract_stack(config, make_mesh({"model": 8}), expert_parallel=True))) == part
    with pytest.raises(
        ValueError, match="stored as FP8: the mesh {'model': 2} would cut its 128 columns into parts of 64"
    ):
        abstract_stack(read_config(packaged_checkpoint()), make_mesh({"model": 2}))


def test_a_group_without_keys_is_filled_on_a_mesh():
    config = CONFIG.with_layers([LayerSpec.hca(16)])
    schema, mesh = (
        CacheSchema(config, num_blocks=8, max_requests=1, max_context=256),
        make_mesh({"model": 2}),
    )
    cache = dataclasses.replace(random_cache(schema, mesh), mailboxes=None)
    assert jax.tree.structure(cache) == jax.tree.structure(KVCache.zeros(schema))
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(cache))


def test_kernels_are_those_of_one_gpu(monkeypatch):
    """Two run 3 launches of 2 milliseconds each in a step."""
    manager = KVCacheManager(CONFIG, num_blocks=8, max_requests=1, max_context=256, mesh=make_mesh({"model": 2}))
    decoder = unittest.mock.MagicMock(StackDecoder, manager=manager, requests=1, tokens=1, drafts=0, step_text="")
    found = [("ncclDevKernel_AllReduce", 2.0)] * (2 * 3 * STEPS)
    monkeypatch.setattr(timing, "kernels", lambda calls: found)
    monkeypatch.setattr(decode_steps, "floor_bytes", lambda *_: 1000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    row = StepCase(decoder, 256).profile(dict(milliseconds=7.0), 1e9, None)
    assert row["kernel_milliseconds"]["all_reduce"] == 6.0 and row["launches"] == 3 and row["gap_milliseconds"] == 1.0


@pytest.mark.parametrize("call,expected", [(4.0, 5.0), (0.0, 5.0), (6.0, pytest.approx(6.0, rel=0.01))])
def test_steps_in_a_row_leave_out_the_first_launch(monkeypatch, call, expected):
    """A step takes the device 5 seconds and its launch the host `call`; the clock is a simulated one."""
    now = device = 0.0

    class Output:
        def __init__(self, end):
            self.end = end

        def block_until_ready(self):
            nonlocal now
            now = max(now, self.end)

    def step(_):
        nonlocal now, device
        now += call
        device = max(now, device) + 5.0
        return Output(device)

    monkeypatch.setattr(decode_steps.time, "perf_counter", lambda: now)
    decoder = unittest.mock.MagicMock(StackDecoder, step=step)
    assert decode_steps._steps_in_a_row(decoder) == expected


def test_steps_in_a_row_have_different_tokens():
    requests, embeddings = 2, jnp.arange(2 * DRAWS, dtype=jnp.float32)[:, None]
    layers, own = types.SimpleNamespace(config=CONFIG), jnp.arange(requests)
    drawn = []
    for position in range(100, 100 + DRAWS):
        batch = Batch(own, jnp.full(requests, position), own, own, own, prefill=False)
        x, batch = attention_stack._draw_tokens(layers, batch, embeddings)
        chex.assert_trees_all_equal(batch.token_ids, x[:, 0].astype(jnp.int32))
        drawn += batch.token_ids.tolist()
    assert sorted(drawn) == list(range(2 * DRAWS))


def test_drafts_are_measured_beside_a_step_with_one_token(run, tmp_path):
    options = "--batches", 2, "--contexts", 256, "--layers", 1, "--drafts", 2, "--json", tmp_path / "steps.json"
    out = run("bench", "step", *options)
    rows = json.loads((tmp_path / "steps.json").read_text())["results"]
    assert [(row["tokens"], row["drafts"]) for row in rows] == [(1, 0), (3, 0), (3, 2)]
    for row in rows[1:]:
        assert row["times_one_token"] == pytest.approx(row["milliseconds"] / rows[0]["milliseconds"], rel=1e-3)
    # Two drafts read the block's weights and a window of 128 rows twice, for two requests; verifying reads no more.
    config = dataclasses.replace(read_config(packaged_checkpoint()), num_nextn_predict_layers=1)
    drafts = make_drafts(config, layer_type=AttentionLayer, param_dtype=jnp.bfloat16, rngs=ABSTRACT)
    block = tree_bytes(drafts) + 2 * 128 * 200
    assert [row["floor_bytes"] - rows[0]["floor_bytes"] for row in rows] == [0, 0, 2 * block]
    rate = 2000 / rows[2]["milliseconds"] * (1 + 0.7 + 0.49)
    assert rows[2]["tokens_per_second"]["0.7"] == pytest.approx(rate, rel=1e-3)
    assert "3 tokens take" in out and "50%, 70%, 90% of the drafts are accepted" in out
    assert rows[2]["draft_milliseconds"] == pytest.approx(rows[2]["milliseconds"] - rows[1]["milliseconds"], abs=1e-3)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dspark", [False, True])
def test_drafts_of_each_request(whole, dspark):
    """Five tokens of each of two requests."""
    released = DSV4Config.v4_flash_0731() if dspark else DSV4Config.v4_flash()
    config = small_config(released).with_layers([LayerSpec()]).with_drafts(True)
    stack = abstract_stack(config) if whole else AttentionStack(config, ABSTRACT)
    schema = CacheSchema(config, num_blocks=4, max_requests=2, max_context=64, block_tokens=64, max_query_tokens=6)
    tokens, x = jax.ShapeDtypeStruct((12,), jnp.int32), jax.ShapeDtypeStruct((12, config.hidden_size), jnp.bfloat16)
    none = jax.ShapeDtypeStruct((0, 3), jnp.int32)
    batch = Batch(tokens, tokens, tokens, none, jax.ShapeDtypeStruct((2,), jnp.int32), prefill=False)

    def draft(stack, x, cache, batch):
        return stack.draft(x, cache, batch, 6, 5)

    drafts, _ = jax.eval_shape(draft, stack, x, KVCache.abstract(schema), batch)
    assert (drafts.shape, drafts.dtype) == ((2, 5), jnp.int32)


def test_the_bytes_that_dsparks_drafts_read():
    """V4-Flash-0731, one request: the parts that a block of five tokens reads once, and `markov_w2` for each draft."""
    stack = abstract_stack(DSV4Config.v4_flash_0731().with_layers([LayerSpec()] * 3))
    expert, markov, head = 3 * 2048 * 4096 * 17 // 32, 129280 * 256 * 2, 129280 * 4096 * 2
    layers = 10_862_838_300 - 2 * markov - 3 * 256 * expert  # without the experts and `markov_head`
    hit = 256 * (1 - (1 - 6 / 256) ** 5)
    layers += 3 * 256 * 4096 * 2  # routers are float32 here and bfloat16 there; so are norms, which hardly count
    assert stack.draft_bytes(1, 5) == pytest.approx(layers + 5 * markov + head + 3 * hit * expert, rel=1e-4)
    assert stack.draft_bytes(1, 0) == 0 and stack.draft_bytes(1, 5) - stack.draft_bytes(1, 4) == markov
    more = 3 * expert * (256 * (1 - (1 - 6 / 256) ** 20) - hit)  # four requests hit more experts
    assert stack.draft_bytes(4, 5) - stack.draft_bytes(1, 5) == pytest.approx(more)
    more = 3 * expert * (256 * (1 - (1 - 6 / 256) ** 6) - 6)
    assert stack.step_bytes(6) - stack.step_bytes(1) == pytest.approx(more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["step", "--shapes", "flash_0731", "--drafts", "6"], "--drafts 6 must be at most 5"),
        (["step", "--mesh", "data=2", "--batches", "4", "3"], "mesh axis data=2 does not divide --batches 3"),
        (["all_reduce", "--mesh", "data=2"], "--mesh data=2 must have more than one device along the axis model"),
        (["model", "--expert-parallel"], "--expert-parallel needs a mesh with more than one device"),
        (["step", "--mesh", "model=4"], "mesh axis model=4 does not divide o_groups=2, vocab_size=258"),
        (["step", "--plot", "x.pdf"], "--plot x.pdf must end in .png"),
        (["step", "--plot", "no/such/x.png"], "--plot no/such/x.png cannot be written: No such file or directory"),
        (["step", "--json", "no/such/x.json"], "--json no/such/x.json cannot be written: No such file or directory"),
        (["ops", "append", "--json", "."], "--json . cannot be written: Is a directory"),
        (["step", "--contexts", "128"], "--contexts 128 must be from 129 to 32768 tokens"),
        (["step", "--contexts", "33000"], "--contexts 33000 must be from 129 to 32768"),
        (["step", "--contexts", "512", "--batches", "0"], "--batches 0 must be at least 1"),
        (["step", "--contexts", "512", "--drafts", "9"], "--drafts 9 must be at most 8"),
        (["step", "--contexts", "512", "--layers", "7"], "--layers 7 must be from 0 (all) to 6"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    assert message in refused("bench", *options)


def test_the_defaults_fit_the_model_that_runs():
    tiny, flash = read_config(packaged_checkpoint()), DSV4Config.v4_flash()
    options = StepOptions()
    assert options.cases(tiny, "cpu") == ((1, 4), (512, 4096))
    assert options.cases(flash, "gpu") == ((1, 8, 32), (4096, 65536, 1048576))
    with pytest.raises(ValueError, match="--contexts 65536 must be from 129 to 32768 tokens"):
        options.cases(tiny, "gpu")


def test_titles_name_the_model_that_ran(monkeypatch, tmp_path):
    titles = []

    @contextlib.contextmanager
    def axes(path, title, *labels):
        titles.append(title)
        yield unittest.mock.MagicMock()

    monkeypatch.setattr(plots, "_axes", axes)
    for shapes in ("tiny", "flash"):
        plots.plot_steps(dict(shapes=shapes, device="cpu", results=[]), tmp_path)
    assert titles == [f"Attention layers of {model}, one decode step, cpu" for model in ("a tiny model", "V4-Flash")]


def test_parts_of_a_layer_and_layers_of_each_kind(run, tmp_path, monkeypatch):
    config = read_config(packaged_checkpoint()).with_layers([LayerSpec(), LayerSpec.hca()])
    monkeypatch.setattr("dsv4_jax.bench.decode_steps.small_config", lambda _: config)
    table, picture = tmp_path / "layer.json", tmp_path / "layer.png"
    options = "--only", "experts", "linear", "append_swa", "--batches", 2, "--contexts", 256, "--calls", 1
    out = run("bench", "layer", *options, "--json", table, "--plot", picture)
    report = json.loads(table.read_text())
    # Appends alone and bfloat16 weights are no parts of a layer.
    assert {row["op"] for row in report["ops"]} == {"linear", "experts"}
    assert all("FP8" in row["shape"] for row in report["ops"] if row["op"] == "linear")
    assert "Whole layers of a tiny model: 1 (sliding_attention)" in out
    for row in report["ops"]:
        floor = 100 * row["floor_microseconds"] / row["microseconds"]
        assert row["percent_of_roofline"] == pytest.approx(floor, rel=0.01, abs=0.06)
    kinds = [(row["layer_type"], row["layers"]) for row in report["results"]]
    assert kinds == [(kind, 1) for kind in config.layer_types]
    assert out.count("Microseconds a layer") == 2
    start = report["start"]
    assert min(start.values()) > 0 and sum(start.values()) < 2 * start["process"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_layers_share_of_a_step_is_printed(capsys):
    row = dict(requests=1, context=4096, tokens=1, drafts=0, milliseconds=0.8, floor_milliseconds=0.4, launches=120.0)
    row |= dict(skew=0.0, percent_of_floor=50.0, dispatch_milliseconds=0.1, gap_milliseconds=0.2)
    row |= dict(kernel_milliseconds={"experts": 0.24, "rest": 0.36})
    table = LiveTable(batch=5, tokens=-9)
    table.add(step_cells(row, layers=8))
    table.add(step_cells(row | dict(requests=32), layers=8))
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(header) == len(lines[0]) == len(lines[1])
    assert header.startswith("batch   context  tokens       drafts      skew     layer     floor   % of it")
    assert lines[0].startswith("    1      4096  1                 0       0.0     100.0      50.0      50.0")
    found = lines[0].split()
    assert found[:7] == ["1", "4096", "1", "0", "0.0", "100.0", "50.0"] and found[-1] == "15.0"
    assert {"30.0", "45.0", "25.0"} <= set(found)
    assert lines[1].split()[0] == "32" and "experts" not in step_cells(row, layers=None)


def test_as_many_layers_as_fit(monkeypatch):
    config, options = DSV4Config.v4_flash(), StepOptions(batches=(1, 128), contexts=(4096, 65536), whole=True)
    found, stack = {}, abstract_stack(config)
    monkeypatch.setattr(decode_steps, "abstract_stack", lambda *_: stack)
    for memory in (80, 141, 192, 1000):
        device = unittest.mock.Mock(memory_stats=lambda: dict(bytes_limit=int(0.95 * memory * 1e9)))  # noqa: B023
        monkeypatch.setattr(jax, "devices", lambda: [device])  # noqa: B023
        found[memory] = decode_steps._max_layers(config, kv_format("v4"), options)
    # A layer has 3.4 to 3.6 GB, and 128 requests of 65,536 tokens 0.7 GB more in all but the first two.
    assert found == {80: 15, 141: 27, 192: 37, 1000: 43}


def test_whole_layers_have_the_releases_storage():
    # An expert of V4-Flash: three matrices of 2048 x 4096 values of four bits, and a byte for each 32 of them.
    config = DSV4Config.v4_flash()
    stack = abstract_stack(config.first_layers(1))
    expert = 3 * 2048 * 4096 * 17 // 32
    assert tree_bytes(nnx.state(stack.layers[0].mlp.experts)) == 256 * expert
    # A token hits 6 of 256.
    assert tree_bytes(nnx.state(stack)) - stack.step_bytes(1) == pytest.approx(250 * expert)
