"""An engine returns the experts and selections of each request's tokens, by position."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import Decisions
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.decode.bigram import MODEL, TABLE, DraftingBigram
from tests.engine.grammars import END, VOCABULARY
from tests.engine.test_engine import drain
from tests.engine.test_exact_logprobs import Remembered
from tests.host.managers import CONFIG, make
from tests.parallel.test_data_axis import bigram_on, make_mesh
from tests.paths import TINY
from tests.v41 import v41_config


NAMES = "experts", "selection"
WARM = SamplingParams(temperature=1.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deciding(DraftingBigram):
    """A model whose decisions tell a token's id and position, so that a code in a wrong place is found."""

    offset: int = dataclasses.field(default=0, metadata={"static": True})

    def forward_decisions(self, cache, batch, names):
        streams = jnp.zeros((len(batch.positions), 1, CONFIG.hidden_size), jnp.bfloat16)
        codes = {"experts": batch.token_ids + 1 + self.offset, "selection": batch.positions + 1}
        codes = {name: codes[name].astype(jnp.uint16)[:, None, None] for name in names}
        return self.hidden(batch.token_ids + 1), streams, Decisions(**codes), cache.begin_step(batch)


BIGRAM = Deciding(MODEL.table)
DRAFTING = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)


def check(request, decisions=None):
    """Compares a request's decisions with those of its tokens that it ran itself: not those of a cached prefix."""
    decisions = request.decisions if decisions is None else decisions
    assert decisions.experts.shape == decisions.selection.shape == (request.num_tokens, 1, 1)
    end = request.num_tokens - 1  # the last token has not run
    positions = np.arange(request.cached_tokens, end)
    for codes, expected in ((decisions.experts, request.tokens[positions]), (decisions.selection, positions)):
        assert (codes[: request.cached_tokens] == 0).all() and (codes[end:] == 0).all()
        np.testing.assert_array_equal(codes[positions, 0, 0], expected + 1)


def serve(engine, drafter=None, **params):
    """Runs requests of several lengths twice, in fewer blocks than they need, some with equal prompts."""
    rng = np.random.default_rng(0)
    shared = rng.integers(CONFIG.vocab_size, size=40).tolist()
    requests = drafter.requests if isinstance(drafter, Remembered) else []
    for again in range(2):
        for i, length in enumerate((40, 3, 33, 1, 25, 40)):
            params |= {"sampling": WARM, "seed": again * (i % 2)}
            requests.append(engine.add(shared[:length], max_new_tokens=(30, 50)[i % 2], **params))
        drain(engine)
    return requests


@pytest.mark.parametrize("drafter", [None, Remembered(), "model"], ids=["no drafts", "host", "device"])
def test_decisions_are_those_of_the_tokens_at_their_positions(drafter):
    """Prompts come in chunks; requests are preempted, hit prefixes, and have drafts accepted and rejected."""
    manager = make(DRAFTING if drafter == "model" else CONFIG, num_blocks=9)
    prefix = PrefixCache(manager, key="bigram")
    engine = Engine(BIGRAM, manager, token_budget=16, drafter=drafter, prefix=prefix, record_decisions=NAMES)
    requests = serve(engine, drafter)
    metrics = engine.metrics
    assert metrics.preemptions and any(request.cached_tokens for request in requests)
    if drafter is not None:
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
    for request in requests:
        check(request)


def test_a_mesh_of_two_shards_of_requests():
    mesh = make_mesh({"data": 2, "model": 2})
    manager = make(mesh=mesh)
    engine = Engine(bigram_on(mesh, BIGRAM), manager, token_budget=16, record_decisions=NAMES)
    requests = serve(engine)
    for request in requests:
        check(request)


def test_stop_tokens_end_the_decisions():
    """A step that was launched already runs the stop token, whose decisions are dropped."""
    engine = Engine(BIGRAM, make(), token_budget=16, record_decisions=NAMES)
    stop_tokens = list(range(0, CONFIG.vocab_size, 3))
    requests = [engine.add([i, 2], max_new_tokens=40, sampling=WARM, seed=i, stop_tokens=stop_tokens) for i in range(4)]
    drain(engine)
    assert {request.finish_reason for request in requests} == {"stop"}
    for request in requests:
        check(request)


def test_steps_with_grammars_record_too():
    """Their tokens are drawn in a second launch."""
    engine = Engine(BIGRAM, make(), token_budget=16, record_decisions=NAMES)
    grammar = VOCABULARY.compile("start: /[0-9]{9,12}/")
    options = {"sampling": WARM, "max_new_tokens": 20, "stop_tokens": (END,)}
    requests = [engine.add([1, 2, 3], grammar=(None, grammar)[i % 2], seed=i, **options) for i in range(4)]
    drain(engine)
    for request in requests:
        check(request)


def test_copies_have_the_decisions_of_their_common_tokens():
    engine = Engine(BIGRAM, make(), token_budget=16, record_decisions=NAMES)
    request = engine.add([5, 6, 7], max_new_tokens=12, sampling=WARM)
    while request.num_generated < 4:
        engine.step()
    children = engine.fork(request, [3, 4])
    drain(engine)
    for one in (request, *children):
        check(one)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_copies_of_a_request_whose_prompt_is_being_read_have_all_values(num_steps):
    """A chunk of the prompt is in flight, which may be the last one. Its values are read after the fork."""
    engine = Engine(BIGRAM, make(), token_budget=16, record_decisions=NAMES, max_logprobs=1)
    prompt = list(range(3, 15))
    request = engine.add(prompt, max_new_tokens=4, prompt_logprobs=True)
    for _ in range(num_steps):
        engine.step()
    assert not request.generated
    children = engine.fork(request, [3, 4])
    drain(engine)
    for one in (request, *children):
        check(one)
        assert one.prompt_logprobs == request.prompt_logprobs
        assert all(one.prompt_logprobs)


def test_new_weights_replace_the_decisions_of_earlier_ones():
    """Of all tokens that run again; those of a prefix that another request ran are forgotten."""
    manager = make()
    prefix = PrefixCache(manager, key="bigram")
    engine = Engine(BIGRAM, manager, token_budget=40, prefix=prefix, record_decisions=NAMES)
    prompt = list(range(34))
    requests = [engine.add(prompt, max_new_tokens=8, sampling=WARM, seed=i, priority=1 - i) for i in range(2)]
    while not all(request.generated for request in requests):
        engine.step()
    before = [request.decisions for request in requests]
    engine.update_weights(dataclasses.replace(BIGRAM, table=jnp.asarray(-TABLE)), running="recompute")
    assert [request.decisions for request in requests] == [None, None]
    drain(engine)
    for request, old in zip(requests, before, strict=True):
        hit = int((request.decisions.selection[:, 0, 0] == 0).argmin())  # tokens that it did not run again
        assert hit in (0, 32)
        again = request.decisions
        check(request, jax.tree.map(lambda *parts: np.concatenate(parts), old[:hit], again[hit:]))


def test_only_what_is_asked_for_is_recorded():
    engine = Engine(BIGRAM, make(), token_budget=16, record_decisions=["experts"])
    request = engine.add([5, 6, 7], max_new_tokens=3)
    assert request.decisions is None
    drain(engine)
    assert request.decisions.selection is None and request.decisions.experts.shape == (6, 1, 1)
    engine = Engine(MODEL, make(), token_budget=16)
    request = engine.add([5, 6, 7], max_new_tokens=3)
    drain(engine)
    assert request.decisions is None


def test_refuses_names_and_models_without_decisions(untyped):
    with pytest.raises(TypeError, match="record_decisions='experts' must be a sequence of names, such as"):
        Engine(BIGRAM, make(), record_decisions="experts")
    with pytest.raises(ValueError, match=r"record_decisions=\['streams'\] are unknown; known: experts, selection"):
        Engine(BIGRAM, make(), record_decisions=("streams", "experts"))
    with pytest.raises(TypeError, match="a model with a method forward_decisions, which Bigram lacks"):
        Engine(MODEL, make(), record_decisions=("experts",))


CONFIGS = {
    "v4": lambda: DSV4Config.from_hf(TINY).first_layers(3),
    "v4 drafts": lambda: DSV4Config.from_hf(TINY, mtp=True).first_layers(3),
    "v41": lambda: v41_config(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), [("v4", None), ("v4 drafts", "model"), ("v41", None)])
def test_decisions_are_those_of_the_whole_sequence(name, drafter):
    """Of one call of the program's shape for each sequence and chunk, so that its bits are those of the engine."""
    config = CONFIGS[name]()
    model = CompiledModel(DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0)))
    sizes = {"max_requests": 3, "max_context": 96, "block_tokens": 16, "dtype": jnp.float32}
    queries = 1 if drafter is None else 2
    manager = KVCacheManager(config, num_blocks=8, max_query_tokens=queries, **sizes)
    options = {"token_budget": 24, "batch_invariant": True, "drafter": drafter, "record_decisions": NAMES}
    prefix = PrefixCache(manager, key="model")
    engine = Engine(model, manager, prefix=prefix, **options)
    prompts = [list(range(40)), list(range(50, 89)), [3, 1]]
    requests = [engine.add(p, max_new_tokens=50, sampling=WARM, seed=i) for i, p in enumerate(prompts)]
    drain(engine)
    requests += [engine.add(request.tokens[:40], max_new_tokens=20) for request in reversed(requests)]
    drain(engine)
    assert engine.metrics.preemptions and any(request.cached_tokens for request in requests)

    @jax.jit
    def step(model, cache, batch):
        _, _, decisions, cache = model.forward_decisions(cache, batch, NAMES)
        return decisions, cache

    whole = KVCacheManager(config, num_blocks=9, max_query_tokens=queries, **sizes)
    cache = whole.init_cache()
    for request in requests:
        slot = whole.admit()
        for start in range(0, request.num_tokens - 1, 24):
            end = min(start + 24, request.num_tokens - 1)
            batch = whole.prepare_forward({slot: request.tokens[start:end]}, prefill_size=24, decode_size=0)
            decisions, cache = step(model, cache, batch)
            places = np.arange(max(start, request.cached_tokens), end)
            for field in NAMES:
                expected = np.asarray(getattr(decisions, field))[places - start]
                np.testing.assert_array_equal(getattr(request.decisions, field)[places], expected)
                assert (getattr(request.decisions, field)[: request.cached_tokens] == 0).all()
        whole.release(slot)
