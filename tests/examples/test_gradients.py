"""Every parameter of a model learns: its gradients are those of central differences and of the dense cache."""

import numpy as np
import pytest
from gradients import INDEXER, compare, page, table
from tiny_model import TOY, first_weights


@pytest.mark.slow
def test_every_parameter_has_its_gradient():
    trained, fixed = first_weights(TOY, 0)
    ids = np.random.default_rng(0).integers(0, TOY.vocab_size, 4 * TOY.sliding_window + 1, dtype=np.int32)
    differences = compare(TOY, trained | fixed, ids, directions=1)
    assert set(differences) == set(trained)
    for path, found in differences.items():
        assert found.norm > 1e-4, path
        if INDEXER in path:
            # A step crosses edges of ReLUs.
            assert found.finite < 0.2, path
            continue
        # A step that changes the loss by 1e-3 of the norm also changes its rounding, by about 3e-8.
        assert found.finite < max(0.03, 3e-5 / found.norm), path
        assert max(found.dense, found.fake_quant) < 2e-4, path
        # Formats of bytes keep the RoPE dims in bfloat16, to which their gradients are rounded.
        assert found.v4 < 2e-2, path
    assert f"each of its {len(trained)} parameters" in page(differences, len(ids) - 1)
    assert all(row.count("|") == 8 for row in table(differences).splitlines())
