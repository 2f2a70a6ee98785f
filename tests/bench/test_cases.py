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


def cases(config, kv_format, names=CASES):
    schema = CacheSchema(config, num_blocks=0, max_requests=1, max_context=1, kv_format=kv_format)
    return [case for name in names for case in CASES[name](schema)]


@pytest.mark.parametrize("name", FILES)
def test_cases_have_the_bytes_and_operations_of_the_files(name):
    report = json.loads((DATA.parents[1] / "benchmarks" / f"{name}.json").read_text())
    config = DSV4Config.v4_pro() if report["shapes"] == "pro" else DSV4Config.v4_flash()
    known = {(case.op, case.shape): case for case in cases(config, report["cache_format"])}
    for row in report["results"]:
        case = known[row["op"], row["shape"]]
        assert case.nbytes == row["bytes"]
        assert case.flops == row.get("operations", case.flops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_format", "ops"),
    [
        ("v4_flash", "v4", CASES),
        ("v4_flash", "per_entry", CASES),
        ("v41_flash", "v41", ("linear", "experts", "router")),
    ],
)
def test_every_op_takes_the_arrays_of_its_cases(name, kv_format, ops):
    """At the sizes of a release, without making an array; an updated state is the next call's."""
    for case in cases(getattr(DSV4Config, name)(), kv_format, ops):
        (layer, *_), (inputs, *_) = jax.eval_shape(lambda: case.make(2))  # noqa: B023
        result = jax.eval_shape(lambda *args: case.call(*args, implementation="xla"), *layer, *inputs)  # noqa: B023
        if case.updates:
            assert jax.tree.structure(result) == jax.tree.structure(layer[0])
