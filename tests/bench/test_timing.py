"""How kernels that overlap are counted."""

from dsv4_jax.bench.timing import without_overlaps


def test_overlapping_kernels_count_once():
    """A kernel that waits for the one before adds only what comes after it; one within another adds nothing."""
    spans = [(0.0, 4e6, "a"), (1e6, 5e6, "b"), (2e6, 3e6, "c"), (9e6, 11e6, "a")]
    assert without_overlaps(spans) == [("a", 4.0), ("b", 1.0), ("c", 0.0), ("a", 2.0)]
