"""`dsv4-jax plan` agrees with the schema: n requests fit, n + 1 do not."""

import collections
import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.checkpoint.random_weights import abstract_model, random_model
from dsv4_jax.cli import main
from dsv4_jax.cli.model_options import ModelOptions
from dsv4_jax.cli.options import named_config
from dsv4_jax.cli.weight_plan import plan_weights
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh
from tests.paths import DATA, TINY


GIB = 2**30
SLOW = pytest.mark.slow
CONFIGS = dict(v4_flash=DSV4Config.v4_flash(), v4_pro=DSV4Config.v4_pro(), tiny=DSV4Config.from_hf(TINY))


def memory_of(config, requests, context, **sizes):
    """Bytes of a cache in which so many requests can fill their contexts."""
    blocks = requests * -(-context // sizes.get("block_tokens", 128))
    schema = CacheSchema(config, num_blocks=blocks, max_requests=requests, max_context=context, **sizes)
    return schema.memory_bytes()


@pytest.mark.parametrize(
    ("name", "context", "memory", "weights", "options", "sizes"),
    [
        ("v4_flash", 1048576, 80 * GIB, 0, [], {}),
        ("v4_pro", 100_001, 141 * 10**9, 96 * GIB // 2, ["--block-tokens", "256"], dict(block_tokens=256)),
        ("v4_flash", 4096, GIB, 0, ["--max-query-tokens", "4"], dict(max_query_tokens=4)),
        ("v4_flash", 4096, GIB, 0, ["--drafts", "2"], dict(max_query_tokens=3)),
        ("tiny", 500, 10**6, 1, ["--cache-format", "per_entry"], dict(kv_format="per_entry")),
        ("tiny", 500, 10**6, 1, ["--cache-format", "v41"], dict(kv_format="v41")),
        (
            "tiny", 500, 10**6, 0, ["--cache-format", "plain", "--dtype", "float32"],
            dict(kv_format="plain", dtype=jnp.float32),
        ),
    ],
)  # fmt: skip
def test_exactly_as_many_as_fit(run, name, context, memory, weights, options, sizes):
    config = CONFIGS[name]
    if "--drafts" in options:
        config = dataclasses.replace(config, num_nextn_predict_layers=1)
    given = ["--config", TINY if name == "tiny" else name, "--memory", f"{memory}B", "--context", context]
    if weights:
        given += ["--weights", f"{weights}B"]
    report = json.loads(run("plan", *given, *options, "--json"))
    assert report["cache_format"] == sizes.get("kv_format", config.kv_format)
    contexts = [row["context"] for row in report["fits"]]
    assert context in contexts and contexts == sorted(set(contexts))
    assert max(contexts) == max(context, config.max_position_embeddings)
    for row in report["fits"]:
        fit = row["requests"]
        assert memory_of(config, 1, row["context"], **sizes) == row["bytes_per_request"]
        if fit:
            assert memory_of(config, fit, row["context"], **sizes) <= memory - weights
        assert memory_of(config, fit + 1, row["context"], **sizes) > memory - weights
    here = next(row for row in report["fits"] if row["context"] == context)
    assert here["requests"] > 0
    assert sum(part["full"] for part in report["pools"].values()) == here["bytes_per_request"]
    blocks = -(-context // report["block_tokens"])
    for part in report["pools"].values():
        assert part["full"] == blocks * part["per_block"] + part["per_request"]


def test_drafts_take_a_window_and_the_streams(run):
    given = ["--config", "v4_flash", "--memory", "80GiB", "--context", "4096", "--json"]
    without, drafts = (json.loads(run("plan", *given, *more))["pools"] for more in ([], ["--drafts", "2"]))
    # One more window of 584-byte rows; in each, room for the step's 2 drafts and one that follows the first.
    more = 584 * (44 * (128 + 3) - 43 * 128)
    assert drafts["sliding windows"]["full"] - without["sliding windows"]["full"] == more
    # Three tokens' four streams of 4096 bfloat16.
    assert drafts["residual streams"]["full"] == 3 * 4 * 4096 * 2


def test_published_bytes_of_flash(run):
    report = json.loads(run("plan", "--config", "v4_flash", "--memory", "80GiB", "--context", "1048576", "--json"))
    assert report["bytes_per_token"] == 3514.25
    # A row is 584 bytes in 21 layers, 32 a block; an indexer key 68.
    assert report["pools"]["csa4 entries"]["per_block"] == 584 * 21 * 32
    assert report["pools"]["csa4 indexer keys"]["per_block"] == 68 * 21 * 32


def test_published_bytes_of_v41_flash(run):
    config = DSV4Config.v41_flash()
    schema = CacheSchema(config, num_blocks=8192, max_requests=1, max_context=1048576, kv_format=config.kv_format)
    assert schema.bytes_per_token == 890 and schema.block_bytes == 113_920
    report = json.loads(run("plan", "--config", "v41_flash", "--memory", "80GiB", "--context", "1048576", "--json"))
    assert (report["cache_format"], report["bytes_per_token"]) == ("v41", 890)
    # Three sources of rate 2 and one of rate 1; an entry is 288 bytes, a key 68; a window row 528.
    pools = report["pools"]
    assert pools["full2 entries"]["per_block"] == 288 * 3 * 64 and pools["full1 entries"]["per_block"] == 288 * 128
    assert (
        pools["full2 indexer keys"]["per_block"] == 68 * 3 * 64 and pools["full1 indexer keys"]["per_block"] == 68 * 128
    )
    assert pools["sliding windows"]["full"] == 40 * 128 * 528 == 2_703_360
    (whole,) = (row["bytes_per_request"] for row in report["fits"] if row["context"] == 1048576)
    assert round(whole / GIB, 2) == 0.87


def test_drafts_of_v41_flash_take_three_windows(run):
    given = ["--config", "v41_flash", "--memory", "80GiB", "--context", "4096", "--json"]
    without, drafts = (json.loads(run("plan", *given, *more))["pools"] for more in ([], ["--drafts", "5"]))
    # Three more windows of 528-byte rows; in each, room for the step's 5 drafts, and for a block that drafting writes.
    rows = (drafts["sliding windows"]["full"] - without["sliding windows"]["full"]) // 528
    assert rows == 43 * (128 + 5 + 5) - 40 * 128


def test_the_rows_of_v41_flash_are_described(run):
    out = " ".join(run("plan", "--config", "v41_flash", "--memory", "80GiB", "--context", "4096").split())
    for text in (
        "A window row: 512 ",
        "= 528 bytes; an entry: 256 ",
        "= 288 bytes; an indexer key: 64 ",
        "= 68 bytes.",
    ):
        assert text in out


@pytest.mark.parametrize(("requests", "memory"), [(64, 80 * GIB), (4, GIB), (3, 40 * 10**6)])
def test_longest_context_of_so_many_requests(run, requests, memory):
    config = CONFIGS["v4_flash"]
    given = ["--config", "v4_flash", "--memory", f"{memory}B", "--context", "65536", "--max-requests", requests]
    report = json.loads(run("plan", *given, "--json"))
    assert all(row["requests"] <= requests for row in report["fits"])
    longest = report["longest_context"]
    if longest:
        assert memory_of(config, requests, longest) <= memory
    assert (longest == 0) == (memory == 40 * 10**6)
    assert memory_of(config, requests, longest + 128) > memory


def bytes_of_a_device(tree):
    """Bytes of the shards of a pytree of shapes, which are as many on each device of its mesh."""
    count = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            shape = (len(range(*part.indices(size))) for part, size in zip(index, leaf.shape, strict=True))
            count[device] += math.prod(shape) * leaf.dtype.itemsize
    (each,) = set(count.values())
    return each


def cache_bytes_of_a_device(config, mesh, context, split, requests, **sizes):
    """Bytes, on each device, of a cache in which so many requests can fill their contexts."""
    blocks = requests * -(-context // 128)
    blocks += -blocks % (mesh.size if split else mesh.shape.get("data", 1))
    sizes |= dict(num_blocks=blocks, max_requests=requests, max_context=context, context_parallel=split)
    return bytes_of_a_device(KVCache.abstract(CacheSchema(config, **sizes), mesh))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sizes", [dict(data=2), dict(data=2, model=2), dict(model=8)], ids=str)
def test_a_mesh_has_room_on_each_device(run, sizes, split):
    """As many requests as its devices hold, whose arrays are cut; a multiple of the parts more is too many."""
    if split and "model" not in sizes:
        return
    config = CONFIGS["v4_flash"]
    memory = 10 * GIB
    context = 16384 + 128
    mesh = make_mesh(sizes)
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    given = ["--config", "v4_flash", "--memory", "10GiB", "--context", context, "--mesh", text, "--json"]
    report = json.loads(run("plan", *given, *["--context-parallel"] * split))
    (row,) = (row for row in report["fits"] if row["context"] == context)

    on_a_device = functools.partial(cache_bytes_of_a_device, config, mesh, context, split)
    requests = row["requests"]
    parts = sizes.get("data", 1)
    assert on_a_device(requests) == memory - row["bytes_left"] <= memory < on_a_device(requests + parts)
    most = [*given, "--max-requests", requests + parts, *["--context-parallel"] * split]
    longest = json.loads(run("plan", *most))["longest_context"]
    assert context - 1024 <= longest < context


@pytest.mark.parametrize(
    ("name", "options", "weights", "requests"),
    [
        ("v4_pro", ["--mesh", "model=8"], 109_785_598_180, (45, 5)),
        pytest.param("v4_pro", ["--mesh", "model=8", "--context-parallel"], 109_785_598_180, (295, 45), marks=SLOW),
        pytest.param("v4_pro_0813", ["--mesh", "model=8", "--drafts", "5"], 115_252_513_000, (37, 4), marks=SLOW),
        pytest.param("v4_flash", ["--mesh", "model=8"], 20_735_960_956, (252, 32), marks=SLOW),
        pytest.param("v4_flash", ["--mesh", "data=2,model=4"], 40_073_317_916, (424, 54), marks=SLOW),
        pytest.param("v41_flash", ["--mesh", "model=8", "--context-parallel"], 63_776_698_178, (4460, 646), marks=SLOW),
        ("v41_flash", ["--mesh", "data=2,model=4", "--drafts", "5", "--expert-parallel"], 128_393_359_436, (210, 26)),
    ],
    ids=str,
)
def test_weights_and_requests_are_those_of_the_shards(run, name, options, weights, requests):
    """Each of eight devices holds as many bytes of the model and of a cache as the plan says."""
    drafts = 5 if "--drafts" in options else 0
    sizes = parse_mesh(options[1])
    mesh = make_mesh(sizes)
    given = ["--config", name, "--memory", "141GB", "--weights", "quantized", "--context", "131072", *options]
    report = json.loads(run("plan", *given, "--json"))
    config = named_config(name, "--config", mtp=drafts > 0)
    model = abstract_model(config, mesh, expert_parallel="--expert-parallel" in options)
    leaves = jax.tree.leaves(model)
    sums = {key: sum(kind[key] for kind in report["weights"].values()) for key in ("model", "device", "replicated")}
    assert sums == dict(
        model=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        device=bytes_of_a_device(model),
        replicated=bytes_of_a_device([leaf for leaf in leaves if leaf.sharding.is_fully_replicated]),
    )
    assert report["weights_bytes"] == sums["device"]
    split = "--context-parallel" in options
    left = 141 * 10**9 - report["weights_bytes"]
    for fit in report["fits"]:
        cache_bytes = functools.partial(
            cache_bytes_of_a_device, config, mesh, fit["context"], split, max_query_tokens=1 + drafts
        )
        shards = sizes.get("data", 1)
        assert cache_bytes(shards) == fit["bytes_per_request"]
        assert cache_bytes(fit["requests"]) == left - fit["bytes_left"] <= left
        assert cache_bytes(fit["requests"] + shards) > left
    numbers = {fit["context"]: fit["requests"] for fit in report["fits"]}
    assert (report["weights_bytes"], numbers[131072], numbers[1048576]) == (weights, *requests)


def test_weights_are_those_that_devices_hold():
    sizes = dict(data=2, model=4)
    config = DSV4Config.small(
        [LayerSpec.hca(8), LayerSpec.csa(4)],
        num_attention_heads=8, o_groups=8, head_dim=128, o_lora_rank=128, moe_intermediate_size=1024,
    )  # fmt: skip
    model = random_model(config, make_mesh(sizes))
    count = collections.Counter()
    for leaf in jax.tree.leaves(model):
        for shard in leaf.addressable_shards:
            count[shard.device] += shard.data.nbytes
    assert len(count) == 8 and set(count.values()) == {
        sum(kind["device"] for kind in plan_weights(config, sizes).values())
    }


def test_tables_show_the_numbers(run):
    out = run("plan", "--config", "v4_flash", "--memory", "80GiB", "--context", "1048576", "--max-requests", "64")
    assert "448 (nope) + 128 (rope) + 8 (scale) = 584 bytes" in out
    for text in (
        "449,824",
        "3,514.25",
        "csa4 entries",
        "80.00 GiB",
        "64 requests can have a context of 377,472 tokens",
    ):
        assert text in out
    row = next(line for line in out.splitlines() if line.startswith("│ 1,048,576"))
    assert row.split("│")[3].strip() == "23"


def test_tables_show_the_weights_of_a_device(run):
    options = "--config", "v4_pro", "--memory", "141GB", "--weights", "quantized", "--mesh", "model=8"
    out = run("plan", *options, "--context", "131072")
    assert "Weights, 102.25 GiB on each device" in out and "Requests that fit 31,214,401,820 bytes" in out
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.startswith("│")]
    rows = {name: numbers for _, name, *numbers, _ in cells}
    assert rows["attention"] == ["20,265,107,840", "5,040,924,992", "2,866,041,728"]
    assert rows["routed experts"] == ["822,054,223,872", "102,756,777,984", "0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "80 apples"], "--memory '80 apples' must be a number with one of the units"),
        (["--memory", "80"], "--memory '80' must be a number with one of the units B, KB, MB, GB"),
        (["--memory", "-5"], "--memory '-5' must be a number"),
        (["--weights", "much"], "--weights 'much' must be a number"),
        (["--weights", "81GiB"], "are more than --memory"),
        (
            ["--weights", "quantized", "--mesh", "model=1"],
            "156097459676 bytes are more than --memory 85899345920 bytes",
        ),
        (["--expert-parallel", ""], "--expert-parallel needs a mesh with more than one device"),
        (["--context", "0"], "--context 0 must be at least 1"),
        (["--context", "1048577"], "max_position_embeddings=1048576"),
        (["--block-tokens", "100"], "--block-tokens 100 must be a multiple of the compression rate 128"),
        (["--block-tokens", "0"], "--block-tokens 0 must be at least 1"),
        (["--max-query-tokens", "0"], "--max-query-tokens 0 must be at least 1"),
        (["--max-requests", "-1"], "--max-requests -1 must be at least 1"),
        (["--mesh", "data=2,model=3"], "model=3 does not divide num_attention_heads=64, o_groups=8"),
        (
            ["--mesh", "data=2", "--context-parallel", ""],
            "--context-parallel needs a mesh with more than one device",
        ),
        (["--config", "v4_mini"], "--config v4_mini is neither v4_flash nor v4_pro nor"),
        (["--config", DATA], "cannot read the configuration"),
        (["--config", DATA / "hf_tiny", "--context", "99"], "24"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    given = {"--config": "v4_flash", "--memory": "80GiB", "--context": "65536"} | dict(
        zip(options[::2], options[1::2], strict=True)
    )
    assert message in refused("plan", *(text for option in given.items() for text in option if text != ""))


@pytest.mark.parametrize(
    ("ratios", "expected"), [([0, 4, 128], 128), ([0], 128), ([4, 48], 144), ([4, 100], 200), ([4, 256], 256)]
)
def test_blocks_are_whole_entries_of_any_rate(run, tmp_path, ratios, expected):
    raw = json.loads((TINY / "config.json").read_text())
    raw |= dict(num_hidden_layers=len(ratios), compress_ratios=ratios, num_hash_layers=0)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    given = ["--config", tmp_path, "--memory", "1GiB", "--context", "1000", "--json"]
    assert json.loads(run("plan", *given))["block_tokens"] == expected
    manager = ModelOptions().make_manager(DSV4Config.from_hf(tmp_path), 2, 1000)
    assert manager.schema.block_tokens == expected and manager.schema.max_context >= 1000


def test_experts_in_host_memory(run, refused):
    given = "plan", "--config", "v4_flash", "--memory", "84GB", "--context", 4096
    report = json.loads(run(*given, "--expert-memory", "60GB", "--json"))
    experts = report["expert_memory"]
    each = 43 * 12 * 2**20  # an expert in every layer
    assert experts["on_host"] == 256 - 60 * 10**9 // each and experts["host_bytes"] == experts["on_host"] * each
    assert report["weights_bytes"] == experts["weights_bytes"] < 84 * 10**9
    # An H100 with 155 of 256 on the host takes 48.7 ms without the head.
    times = {(row["tokens"], row["skew"]): row["milliseconds"] for row in experts["steps"]}
    assert 40 < times[1, 0.0] < 55 and 10 < times[1, 1.0] < 0.5 * times[1, 0.0] < times[8, 1.0] < times[8, 0.0]
    out = run(*given, "--expert-memory", "auto", "--gpu", "h200")
    assert "of 256 experts a layer stay in host memory" in out and "H200" in out
    assert "leave out --weights and --mesh" in refused(*given, "--expert-memory", "auto", "--weights", "1GB")
    assert "is too little for" in refused(*given, "--expert-memory", "80GB")
    assert "is too little for" in refused(
        "plan", "--config", "v4_flash", "--memory", "15GB", *given[5:], "--expert-memory", "auto"
    )


def test_experts_of_v41_in_host_memory(run, capsys):
    """Its tables lie there, but an expert is no whole number of pages."""
    options = "plan", "--config", "v41_flash", "--context", "4096", "--expert-memory", "auto", "--memory"
    report = json.loads(run(*options, "420GB", "--json"))
    assert report["expert_memory"]["on_host"] == 0 and 290e9 < report["weights_bytes"] < 310e9
    assert main([*options, "141GB"]) == 2
    assert (
        "a matrix must be whole pages of 2097152 bytes; the model's have 11796480 and 5898240"
        in capsys.readouterr().err
    )
    assert main([*options, "420GB", "--drafts", "5"]) == 2
    assert "expert memory needs as many experts in each layer" in capsys.readouterr().err
