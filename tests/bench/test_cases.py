"""The cases of ops are those of the committed files, and every op takes the arrays of its cases."""

import json

import jax
import pytest

from dsv4_jax.bench.op_times import CASES
from dsv4_jax.cache import CacheSchema
from dsv4_jax.config import DSV4Config
from tests.paths import DATA


FILES = (
    "h100_flash_per_entry", "h200_attention_flash_v4", "h200_attention_pro_v4", "h200_flash_v4",
    "h200_flush_op_flash_v4", "h200_indexer_v4", "h200_linear_v4", "h200_quantized_weights",
)  # fmt: skip


def cases(config, kv_format):
    schema = CacheSchema(config, num_blocks=0, max_requests=1, max_context=1, kv_format=kv_format)
    return [case for name in CASES for case in CASES[name](schema)]


@pytest.mark.parametrize("name", FILES)
def test_cases_have_the_bytes_and_operations_of_the_files(name):
    report = json.loads((DATA.parents[1] / "benchmarks" / f"{name}.json").read_text())
    config = DSV4Config.v4_pro() if report["shapes"] == "pro" else DSV4Config.v4_flash()
    known = {(case.op, case.shape): case for case in cases(config, report["cache_format"])}
    for row in report["results"]:
        case = known[row["op"], row["shape"]]
        assert case.nbytes == row["bytes"]
        assert case.flops == row.get("operations", case.flops)


def test_cases_of_v41_have_its_shapes():
    known = {(case.op, case.shape): case for case in cases(DSV4Config.v41_flash(), "v41")}
    assert known["append_swa", "T=1"].nbytes == 1024 + 8 + 528
    # Values of a token come in as float32, with logits only if two tokens are pooled. 288 + 68 bytes go out. A pair's
    # first token is in the state, to which both values of the second go, too.
    assert known["flush", "FULL1 1, all close"].nbytes == 8 + 4 * 512 + 288 + 68
    assert known["flush", "FULL2 1, all close"].nbytes == 8 + 3 * 8 * 512 + 288 + 68
    assert known["gather_compressed_kv", "8 x 512"].nbytes == 8 * (512 * (4 + 288 + 1024 + 1) + 4)
    within = known["indexer_scores", "1 x 262144, in 2048 blocks"]
    assert within.flops == 2 * 32 * 128 * 2048 * 8
    assert within.nbytes == 2048 * 8 * (68 + 4) + 32 * (2 * 128 + 4) + 8 + 4 * 2048
    assert known["experts", "FP4, T=1"].flops == 6 * 6 * 5120 * 2304
    assert known["linear", "q_b / 1 in FP8, T=1"].layer[0].kind == "FP8_32"
    assert ("router", "table, T=1") not in known and ("flush", "FULL1 64, none closes") not in known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kv_format"),
    [(DSV4Config.v4_flash(), "v4"), (DSV4Config.v4_flash(), "per_entry"), (DSV4Config.v41_flash(), "v41")],
    ids=["v4", "per_entry", "v41"],
)
def test_every_op_takes_the_arrays_of_its_cases(config, kv_format):
    """At the sizes of a release, without making an array; an updated state is the next call's."""
    for case in cases(config, kv_format):
        (layer, *_), (inputs, *_) = jax.eval_shape(lambda: case.make(2))  # noqa: B023
        result = jax.eval_shape(lambda *args: case.call(*args, implementation="xla"), *layer, *inputs)  # noqa: B023
        if case.updates:
            assert jax.tree.structure(result) == jax.tree.structure(layer[0])
