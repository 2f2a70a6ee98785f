"""`dsv4-jax bench model` and `layer` where there is no GPU: a tiny model's steps."""

import contextlib
import dataclasses
import json
import unittest.mock

import jax
import pytest
from flax import nnx

from dsv4_jax.bench import decode_steps, plots, step_cases, timing
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.bench.random_steps import DRAWS, RandomSteps, random_cache
from dsv4_jax.bench.step_cases import STEPS, StepCase
from dsv4_jax.bench.step_options import StepOptions
from dsv4_jax.bench.step_work import step_work, weight_work
from dsv4_jax.bench.tables import layer_share, print_rows
from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.checkpoint.random_weights import abstract_model
from dsv4_jax.cli.bench_command import ModelBench
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.mesh import make_mesh
from tests.host.managers import CONFIG
from tests.v41 import v41_config


def steps_of(config, requests, tokens=1, drafts=0, mesh=None):
    """Steps that only have shapes."""
    sizes = dict(num_blocks=8, max_requests=requests, max_context=512, max_query_tokens=1 + drafts, mesh=mesh)
    manager = KVCacheManager(config, **sizes)
    return RandomSteps(CompiledModel(abstract_model(config, mesh)), manager, requests, tokens, drafts)


@pytest.mark.slow
def test_measures_and_writes_json_and_a_picture(run, tmp_path):
    """A step of one token, one that verifies two drafts, and one that also makes them."""
    table = tmp_path / "steps.json"
    picture = tmp_path / "steps.png"
    options = "--batches", 2, "--contexts", 256, "--layers", 1, "--drafts", 2, "--json", table, "--plot", picture
    out = run("bench", "model", *options)
    assert "Layers of a tiny model: 1 (sliding_attention)" in out
    report = json.loads(table.read_text())
    assert report["shapes"] == "tiny"
    start = report["start"]
    assert min(start.values()) > 0 and sum(start.values()) < 2 * start["process"]
    rows = report["results"]
    assert [(row["requests"], row["context"], row["tokens"], row["drafts"]) for row in rows] == [
        (2, 256, 1, 0),
        (2, 256, 3, 0),
        (2, 256, 3, 2),
    ]
    for row in rows:
        assert 0 < row["dispatch_milliseconds"] < row["milliseconds"] * 2
        assert ("loop_milliseconds" in row) == (row["tokens"] == 1)
        ratio = 100 * row["floor_milliseconds"] / row["milliseconds"]
        assert row["percent_of_floor"] == pytest.approx(ratio, rel=1e-3)
    for row in rows[1:]:
        assert row["times_one_token"] == pytest.approx(row["milliseconds"] / rows[0]["milliseconds"], rel=1e-3)
    rate = 2000 / rows[2]["milliseconds"] * (1 + 0.7 + 0.49)
    assert rows[2]["tokens_per_second"]["0.7"] == pytest.approx(rate, rel=1e-3)
    header, *lines = (line for line in out.splitlines() if "launches" in line or line.startswith("    2"))
    assert header.endswith("x one token  drafts ms  50% accepted  70% accepted  90% accepted")
    assert lines[2].split()[-2] == f"{rows[2]['tokens_per_second']['0.7']:.0f}"
    assert rows[2]["draft_milliseconds"] == pytest.approx(rows[2]["milliseconds"] - rows[1]["milliseconds"], abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_mesh_halves_the_requests_of_a_device(run, tmp_path):
    floors = []
    for options in (["--batches", 1], ["--batches", 2, "--mesh", "data=2"]):
        file = tmp_path / f"{len(options)}.json"
        run("bench", "model", "--contexts", 256, "--layers", 1, "--json", file, *options)
        report = json.loads(file.read_text())
        floors.append(report["results"][0]["floor_bytes"])
    assert report["mesh"] == {"data": 2} and floors[0] == floors[1]


def test_what_a_step_reads_of_the_cache():
    """256 more tokens for two requests: 64 indexer keys of 34 bytes, as many entries of 200, and 2 of the HCA layer."""
    steps = steps_of(read_config(packaged_checkpoint()).first_layers(3), 2)
    (short, *_), (long, *_) = (step_work(steps, context)[1:] for context in (256, 512))
    assert long - short == 2 * (64 * 34 + 64 * 200 + 2 * 200)


def test_a_layer_with_candidates_reads_their_keys_only():
    """3 blocks of 4 candidates: 12 keys of 16 + 1 bytes, however long the context; 256 more tokens for other layers."""
    config = v41_config()
    (_, short, _), (_, long, _) = (step_work(steps_of(config, 1), context) for context in (128, 384))
    assert long - short == 128 * (16 + 1) + 256 * (16 + 1)  # of rate 2 and of rate 1
    short, long = (step_work(steps_of(config, 1), context)[0] for context in (128, 384))
    assert long - short == 2 * config.index_n_heads * config.index_head_dim * (128 + 256)


def test_what_drafts_read():
    """Two drafts read the layer's weights, the head and a window of 128 rows twice; verifying reads experts only."""
    config = read_config(packaged_checkpoint(), mtp=True).first_layers(1)
    model = abstract_model(config)
    sizes = (1, 0), (3, 0), (3, 2)
    one, verify, whole = (step_work(steps_of(config, 2, *size), 256)[1] for size in sizes)
    experts = tree_bytes(nnx.state(model.model.layers[0].mlp.experts))
    hit = {rows: 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows for rows in (2, 6)}
    assert verify - one == pytest.approx((hit[6] - hit[2]) * experts, abs=2)
    drafts = tree_bytes(nnx.state(model.drafts)) - (1 - hit[2]) * experts
    assert whole - verify == pytest.approx(2 * (drafts + tree_bytes(model.lm_head) + 2 * 128 * 200), abs=2)


def test_the_products_of_a_chunk():
    """A sliding layer's window is full after 256 tokens: 16 x 128 rows instead of 1 + ... + 16."""
    config = read_config(packaged_checkpoint()).first_layers(1)
    steps = steps_of(config, 1, tokens=16)
    assert steps.is_prefill
    begin, later = (step_work(steps, context)[0] for context in (16, 272))
    width = 4 * config.num_attention_heads * config.head_dim
    assert later - begin == width * (16 * config.sliding_window - 16 * 17 // 2)
    # A layer without an indexer: of each token with each matrix, two of the eight experts among them.
    hidden = config.hidden_size
    inner = config.moe_intermediate_size
    latent = config.q_lora_rank
    out = config.o_lora_rank
    heads = config.num_attention_heads * config.head_dim
    groups = config.o_groups
    values = hidden * (latent + config.head_dim) + latent * heads + heads * out + groups * out * hidden
    values += 3 * hidden * inner * (1 + config.num_experts_per_tok) + config.n_routed_experts * hidden
    values += 2 * (2 + config.hc_mult) * config.hc_mult * config.hc_mult * hidden
    assert weight_work(steps.model.module, config, 1, 16, 0)[0] == 2 * 16 * values


def test_devices_of_a_mesh_share_the_products_of_sharded_maps():
    config = DSV4Config.v4_flash().first_layers(2)
    whole, half = (
        weight_work(abstract_model(config, mesh), config, 1, 8, 0)[0] for mesh in (None, make_mesh({"model": 2}))
    )
    replicated = config.hidden_size * (config.q_lora_rank + config.head_dim + config.n_routed_experts)
    replicated += 2 * (2 + config.hc_mult) * config.hc_mult * config.hc_mult * config.hidden_size
    assert 2 * half - whole == 2 * 8 * 2 * replicated  # two operations for each value, token and layer


def test_a_model_in_the_releases_storage_is_cut_by_whole_blocks():
    config = DSV4Config.v4_flash().first_layers(3)
    whole, part = (tree_bytes(nnx.state(abstract_model(config, mesh))) for mesh in (None, make_mesh({"model": 8})))
    assert 0.125 < part / whole < 0.15  # experts are nearly all
    assert tree_bytes(nnx.state(abstract_model(config, make_mesh({"model": 8}), expert_parallel=True))) == part
    with pytest.raises(
        ValueError, match="stored as FP8: the mesh {'model': 2} would cut its 128 columns into parts of 64"
    ):
        abstract_model(read_config(packaged_checkpoint()), make_mesh({"model": 2}))


def test_a_group_without_keys_is_filled_on_a_mesh():
    config = CONFIG.with_layers([LayerSpec.hca(16)])
    schema = CacheSchema(config, num_blocks=8, max_requests=1, max_context=256)
    mesh = make_mesh({"model": 2})
    cache = dataclasses.replace(random_cache(schema, mesh), mailboxes=None)
    assert jax.tree.structure(cache) == jax.tree.structure(KVCache.zeros(schema))
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(cache))


def test_kernels_are_those_of_one_gpu(monkeypatch):
    """Two run 3 launches of 2 milliseconds each in a step."""
    manager = KVCacheManager(CONFIG, num_blocks=8, max_requests=1, max_context=256, mesh=make_mesh({"model": 2}))
    numbers = dict(manager=manager, requests=1, tokens=1, drafts=0, is_prefill=False)
    steps = unittest.mock.MagicMock(RandomSteps, **numbers, program=unittest.mock.Mock())
    steps.program.call.as_text.return_value = ""
    found = [("ncclDevKernel_AllReduce", 2.0)] * (2 * 3 * STEPS)
    monkeypatch.setattr(timing, "kernels", lambda calls: found)
    monkeypatch.setattr(step_cases, "step_work", lambda *_: (0, 1000, 0))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    row = StepCase(steps, 256).profile(dict(milliseconds=7.0), dict(copy_bytes_per_second=1e9))
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

    monkeypatch.setattr(step_cases.time, "perf_counter", lambda: now)
    steps = unittest.mock.MagicMock(RandomSteps, step=step)
    assert step_cases._steps_in_a_row(steps, STEPS) == expected


def test_steps_in_a_row_have_different_tokens():
    """Two requests, each of which keeps one of three tokens a step."""
    steps = steps_of(read_config(packaged_checkpoint(), mtp=True).first_layers(1), 2, tokens=3, drafts=2)
    steps._slots = [steps.manager.admit() for _ in range(2)]
    drawn = [steps.batch() for _ in range(DRAWS)]
    ids = [int(token) for batch in drawn for token in batch.token_ids]
    assert ids == list(range(6 * DRAWS))
    assert [batch.positions.tolist() for batch in drawn[:2]] == [[0, 1, 2] * 2, [1, 2, 3] * 2]
    assert steps._logits_indices.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_chunk_stays_in_its_place():
    steps = steps_of(CONFIG, 1, tokens=24)
    steps._slots = [steps.manager.admit()]
    batch = steps.batch()
    assert batch.prefill and steps.batch() is batch and steps._logits_indices.tolist() == [23]


def test_the_bytes_that_dsparks_drafts_read():
    """V4-Flash-0731, one request: the parts that a block of five tokens reads once, and `markov_w2` for each draft."""
    config = DSV4Config.v4_flash_0731().with_layers([LayerSpec()] * 3)
    model = abstract_model(config)

    def read(requests, drafts):
        return weight_work(model, config, requests, 1, drafts)[1] - weight_work(model, config, requests, 1, 0)[1]

    expert = 3 * 2048 * 4096 * 17 // 32
    markov = 129280 * 256 * 2
    head = 129280 * 4096 * 2
    layers = 10_862_838_300 - 2 * markov - 3 * 256 * expert  # without the experts and `markov_head`
    hit = 256 * (1 - (1 - 6 / 256) ** 5)
    layers += 3 * 256 * 4096 * 2  # routers are float32 here and bfloat16 there; so are norms, which hardly count
    assert read(1, 5) == pytest.approx(layers + 5 * markov + head + 3 * hit * expert, rel=1e-4)
    assert read(1, 0) == 0 and read(1, 5) - read(1, 4) == markov
    more = 3 * expert * (256 * (1 - (1 - 6 / 256) ** 20) - hit)  # four requests hit more experts
    assert read(4, 5) - read(1, 5) == pytest.approx(more)
    more = 3 * expert * (256 * (1 - (1 - 6 / 256) ** 6) - 6)
    six, one = (weight_work(model, config, 1, tokens, 0)[1] for tokens in (6, 1))
    assert six - one == pytest.approx(more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model", "--config", "v4_flash_0731", "--drafts", "6"], "--drafts 6 must be at most 5"),
        (["model", "--mesh", "data=2", "--batches", "4", "3"], "mesh axis data=2 does not divide --batches 3"),
        (["all_reduce", "--mesh", "data=2"], "--mesh data=2 must have more than one device along the axis model"),
        (["model", "--expert-parallel"], "--expert-parallel needs a mesh with more than one device"),
        (["model", "--mesh", "model=4"], "mesh axis model=4 does not divide o_groups=2, vocab_size=258"),
        (["model", "--plot", "x.pdf"], "--plot x.pdf must end in .png"),
        (["model", "--plot", "no/such/x.png"], "--plot no/such/x.png cannot be written: No such file or directory"),
        (["model", "--json", "no/such/x.json"], "--json no/such/x.json cannot be written: No such file or directory"),
        (["ops", "append", "--json", "."], "--json . cannot be written: Is a directory"),
        (["model", "--contexts", "128"], "--contexts 128 must be at least 129"),
        (["model", "--contexts", "33000"], "--contexts 33000 must be at most 32768"),
        (["model", "--contexts", "512", "--batches", "0"], "--batches 0 must be at least 1"),
        (["model", "--contexts", "512", "--drafts", "9"], "--drafts 9 must be at most 8"),
        (["model", "--contexts", "512", "--layers", "7"], "--layers 7 must be at most 6"),
        (["prefill", "--chunks", "1"], "--chunks 1 must be at least 2"),
        (["prefill", "--contexts", "-1"], "--contexts -1 must be at least 0"),
        (["prefill", "--contexts"], "--contexts needs at least one number"),
        (["prefill", "--chunks"], "--chunks needs at least one number"),
        (["model", "--config", "v41_flash"], "--config v41_flash needs a GPU: on a CPU, a tiny model replaces"),
        (["prefill", "--config", "no"], "--config no is neither v4_flash nor v4_pro"),
        (["serve", "--requests", "0"], "--requests 0 must be at least 1"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    assert message in refused("bench", *options)


def test_the_defaults_fit_the_model_that_runs(monkeypatch):
    tiny = read_config(packaged_checkpoint())
    flash = DSV4Config.v4_flash()
    command = ModelBench()
    cpu = command._options(StepOptions, None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = command._options(StepOptions, None)
    assert (cpu.batches, cpu.contexts, gpu.contexts) == ((1, 4), (512, 4096), (4096, 65536))
    assert command._options(StepOptions, make_mesh({"data": 2})).batches == (8, 32, 128)
    cpu.check(tiny)
    gpu.check(flash)
    with pytest.raises(ValueError, match="contexts=65536 must be at most 32768"):
        gpu.check(tiny)


def test_titles_name_the_model_that_ran(monkeypatch, tmp_path):
    titles = []

    @contextlib.contextmanager
    def axes(path, title, **labels):
        titles.append(title)
        yield unittest.mock.MagicMock()

    monkeypatch.setattr(plots, "_axes", axes)
    for shapes in ("tiny", "flash"):
        plots.plot_prefill(dict(shapes=shapes, device="cpu", results=[]), tmp_path)
    assert titles == [f"Layers of {model}, chunks of a prompt, cpu" for model in ("a tiny model", "V4-Flash")]


@pytest.mark.slow
def test_layers_of_each_kind(run, tmp_path, monkeypatch):
    config = read_config(packaged_checkpoint()).with_layers([LayerSpec(), LayerSpec.hca()])
    monkeypatch.setattr(decode_steps, "measured_config", lambda *_: config)
    table = tmp_path / "layer.json"
    picture = tmp_path / "layer.png"
    out = run("bench", "layer", "--batches", 2, "--contexts", 256, "--json", table, "--plot", picture)
    report = json.loads(table.read_text())
    assert out.count("Layers of V4-Flash: 1 (") == 2
    kinds = [(row["layer_type"], row["layers"]) for row in report["results"]]
    assert kinds == [(kind, 1) for kind in config.layer_types]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_layers_share_of_a_step_is_printed(capsys):
    row = dict(requests=1, context=4096, tokens=1, drafts=0, milliseconds=0.9, floor_milliseconds=0.5, launches=120.0)
    row |= dict(layers=8, skew=0.0, percent_of_floor=50.0, dispatch_milliseconds=0.1, gap_milliseconds=0.2)
    row |= dict(floor_bytes=1000, head_bytes=200, kernel_milliseconds={"experts": 0.24, "rest": 0.36, "lm_head": 0.1})
    share = layer_share(row)
    assert [round(share[name], 6) for name in ("layer", "layer_floor", "outside", "gaps")] == [100.0, 50.0, 0.1, 25.0]
    assert {kind: round(time, 6) for kind, time in share["kinds"].items()} == {"experts": 30.0, "rest": 45.0}
    rows = [row, row | dict(requests=32)]
    assert list(print_rows(rows, decode_steps.COLUMNS, layer_share, batch=5, tokens=-9)) == rows
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(header) == len(lines[0]) == len(lines[1])
    assert header.startswith("batch   context  tokens       drafts      skew   step ms  % of floor   loop ms")
    assert lines[0].startswith("    1      4096  1                 0       0.0     0.900        50.0            ")
    assert lines[0].split()[-1] == "120" and lines[1].split()[0] == "32"


def test_as_many_layers_as_fit(monkeypatch):
    config = DSV4Config.v4_flash()
    options = StepOptions(batches=(1, 128), contexts=(4096, 65536))
    found = {}
    for memory in (80, 141, 192, 1000):
        device = unittest.mock.Mock(memory_stats=lambda: dict(bytes_limit=int(0.95 * memory * 1e9)))  # noqa: B023
        monkeypatch.setattr(jax, "devices", lambda: [device])  # noqa: B023
        found[memory] = decode_steps._max_layers(config, options)
    # A layer has 3.4 to 3.6 GB, 128 requests of 65,536 tokens 0.7 GB more in all but the first two, embedding and head
    # have 2.1 GB.
    assert found == {80: 15, 141: 26, 192: 36, 1000: 43}


def test_whole_layers_have_the_releases_storage():
    # An expert of V4-Flash: three matrices of 2048 x 4096 values of four bits, and a byte for each 32 of them.
    config = DSV4Config.v4_flash().first_layers(1)
    model = abstract_model(config)
    expert = 3 * 2048 * 4096 * 17 // 32
    assert tree_bytes(nnx.state(model.model.layers[0].mlp.experts)) == 256 * expert
    # A token hits 6 of 256, and reads rows of the embedding and of the table of experts.
    tables = 129280 * 4096 * 2 + 129280 * 6 * 4
    read = weight_work(model, config, 1, 1, 0)[1]
    assert tree_bytes(nnx.state(model)) - read - tables == pytest.approx(250 * expert)
