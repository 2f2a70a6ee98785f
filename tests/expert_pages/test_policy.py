"""Placement on traces: it finds the hot experts, follows a topic, and does not run after noise."""

import numpy as np
import pytest

from dsv4_jax.expert_pages import PlacementPolicy


LAYERS = 4
EXPERTS = 256
TOP_K = 6
EVERY = 8  # tokens between two choices


def zipf(rng, skew):
    """Probabilities of a topic: an expert's rank is its own in every layer."""
    weights = np.arange(1, EXPERTS + 1.0) ** -skew
    return np.stack([rng.permutation(weights / weights.sum()) for _ in range(LAYERS)])


def select(rng, probabilities, tokens):
    """Selections [tokens, layers, k] without repetition, by Gumbel's trick."""
    scores = np.log(probabilities) + rng.gumbel(size=(tokens, *probabilities.shape))
    return np.argsort(-scores, axis=2)[:, :, :TOP_K]


class Simulation:
    def __init__(self, on_device, limit=10**9, **options):
        self.policy = PlacementPolicy(np.zeros((LAYERS, EXPERTS)), **options)
        self.limit = limit
        self.on_host = np.tile(np.arange(EXPERTS) >= on_device, (LAYERS, 1))
        self.moved = 0

    def run(self, selected):
        """Returns the share of selections that hit the GPU, for each `EVERY` tokens."""
        shares = []
        for chunk in np.split(selected, len(selected) // EVERY):
            hits = np.stack([np.bincount(chunk[:, i].ravel(), minlength=EXPERTS) for i in range(LAYERS)])
            shares.append((hits * ~self.on_host).sum() / hits.sum())
            self.policy.count(hits, len(chunk))
            for layer, hot, cold in self.policy.swaps(self.on_host, self.limit):
                assert self.on_host[layer, hot] and not self.on_host[layer, cold]
                self.on_host[layer, [hot, cold]] = False, True
                self.moved += 1
        return np.array(shares)


def oracle(selected, on_device):
    """The share of selections that hit if the GPU holds the trace's most selected experts."""
    counts = np.stack([np.bincount(selected[:, i].ravel(), minlength=EXPERTS) for i in range(LAYERS)])
    return np.sort(counts, axis=1)[:, -on_device:].sum() / counts.sum()


@pytest.mark.parametrize("on_device", [26, 102, 230])
def test_a_topic_that_changes_every_500_tokens_is_followed(on_device):
    rng = np.random.default_rng(0)
    simulation = Simulation(on_device)
    shares = []
    best = []
    for _ in range(6):
        selected = select(rng, zipf(rng, 1.0), 504)
        shares.append(simulation.run(selected)[200 // EVERY :].mean())
        best.append(oracle(selected, on_device))
    assert min(np.array(shares) / best) > 0.8


def test_few_moves_a_choice_suffice_for_a_lasting_topic():
    rng = np.random.default_rng(1)
    selected = select(rng, zipf(rng, 1.0), 4000)
    simulation = Simulation(102, limit=2)
    shares = simulation.run(selected)
    assert simulation.moved <= 2 * len(shares)
    assert shares[-100:].mean() > 0.9 * oracle(selected, 102)


def test_uniform_routing_moves_little():
    rng = np.random.default_rng(2)
    simulation = Simulation(128)
    simulation.run(select(rng, zipf(rng, 0.0), 2000))
    # An LRU would move the half of 2000 * 6 selections in each layer.
    assert simulation.moved < 0.2 * 2000 * TOP_K / 2 * LAYERS


def test_topics_that_alternate_faster_than_counts_fade_settle():
    """Between two topics that take turns, experts of both stay, and none goes to and fro."""
    rng = np.random.default_rng(3)
    topics = [zipf(rng, 1.0) for _ in range(2)]
    selected = np.concatenate([select(rng, topics[i % 2], EVERY) for i in range(250)])
    simulation = Simulation(102)
    shares = simulation.run(selected)
    moved = simulation.moved
    assert shares[-100:].mean() > 0.9 * oracle(selected, 102)
    simulation.run(selected)
    assert simulation.moved - moved < 0.1 * selected[:, 0].size * LAYERS / 2


def test_the_best_swaps_come_first():
    policy = PlacementPolicy(np.array([[0.0, 0, 50, 90], [10, 0, 40, 0]]), margin=0.0)
    on_host = np.array([[False, False, True, True], [False, True, True, False]])
    assert policy.swaps(on_host, 9) == [(0, 3, 0), (0, 2, 1), (1, 2, 3)]
    assert policy.swaps(on_host, 1) == [(0, 3, 0)]
    assert policy.swaps(~on_host, 9) == [(1, 0, 1)]


@pytest.mark.parametrize("host", [0, 4])
def test_nothing_moves_where_all_experts_lie_on_one_side(host):
    policy = PlacementPolicy(np.arange(8.0).reshape(2, 4))
    assert policy.swaps(np.tile(np.arange(4) < host, (2, 1)), 9) == []
