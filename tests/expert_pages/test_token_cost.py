"""The estimate of a token's time, against what was measured."""

import dataclasses

import pytest

from dsv4_jax.expert_pages.token_cost import BUS_RATE, READ_RATES, TokenCost


EXPERT = 12 << 20  # an expert's codes in V4-Flash
FLASH = TokenCost(43, 256, 6, EXPERT, 0, READ_RATES["h100"])
# Milliseconds of the experts of 43 layers at skew 0, 0.6 and 1, measured before the kernels read as they do now.
MEASURED = [
    ("h200", 26, 1, (9.29, 5.04, 3.05)),
    ("h200", 26, 2, (16.0, 9.8, 5.3)),
    ("h200", 26, 8, (57.8, 29.1, 15.7)),
    ("h200", 26, 32, (173.0, 95.0, 46.0)),
    ("h100", 154, 1, (49.8, 28.2, 15.4)),
    ("h100", 154, 2, (107.0, 57.0, 29.0)),
    ("h100", 154, 4, (196.0, 113.0, 60.0)),
]


@pytest.mark.parametrize(("gpu", "on_host", "tokens", "measured"), MEASURED)
def test_the_experts_of_a_sketch(gpu, on_host, tokens, measured):
    """Within 30%: few misses in a layer are read at 29 GB/s, many at 56, and the estimate has one rate of 45."""
    cost = dataclasses.replace(FLASH, read_rate=READ_RATES[gpu])
    for skew, milliseconds in zip((0.0, 0.6, 1.0), measured, strict=True):
        found = cost.milliseconds(on_host, skew, tokens) - cost.milliseconds(0, skew, 0)
        assert found == pytest.approx(milliseconds, rel=0.3), skew


@pytest.mark.parametrize(("on_host", "tokens", "measured", "rel"), [
    (155, 1, 48.65, 0.05), (155, 8, 316.98, 0.05), (157, 1, 58.7, 0.2), (130, 1, 39.45, 0.2),
])  # fmt: skip
def test_steps_of_the_whole_model(on_host, tokens, measured, rel):
    """Within 5% of benchmarks/h100_one_gpu_model_flash_v4.json, whose rates these are, and 20% of others.

    Its layers, with neither embedding nor head, have 6.82 GB of other weights.
    """
    cost = dataclasses.replace(FLASH, other_bytes=6_820_000_000)
    assert cost.milliseconds(on_host, 0.0, tokens) == pytest.approx(measured, rel=rel)


def test_misses():
    assert FLASH.misses(0, 1.0) == 0 and FLASH.misses(256, 1.0) == pytest.approx(43 * 6)
    assert FLASH.misses(64, 0.0) == pytest.approx(43 * 6 / 4)
    assert FLASH.misses(64, 1.0, 4) < FLASH.misses(64, 0.6, 4) < FLASH.misses(64, 0.0, 4) < 4 * 43 * 6 / 4
    slower = FLASH.milliseconds(64, 0.0) - FLASH.milliseconds(0, 0.0)
    assert slower == pytest.approx(1e3 * 43 * 1.5 * EXPERT * (1 / BUS_RATE - 1 / 3e12))
