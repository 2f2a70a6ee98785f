"""New weights in an engine: nothing compiles, nothing stale is hit, and requests go on as the caller chose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.engine import Engine
from dsv4_jax.host import PrefixCache, PrefixFiles, offload, resume
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.engine.test_engine import PROGRAMS, drain


RNG = np.random.default_rng(7)
SYSTEM = RNG.integers(160, size=40).tolist()
PROMPTS = [SYSTEM[:n] + RNG.integers(160, size=more).tolist() for n, more in ((40, 9), (40, 30), (33, 2), (0, 20))]
# Of these, new tokens fill more blocks than a request has reserved when it is admitted: others are preempted.
GROWING = [SYSTEM[:n] + RNG.integers(160, size=more).tolist() for n, more in ((40, 20), (40, 35), (33, 10), (0, 28))]
WARM = SamplingParams(temperature=1.0)
NEW_TOKENS = 24


def make(model, manager, **options):
    """An engine with one program: requests that are recomputed get the bits of requests that are not."""
    return Engine(model, manager, token_budget=24, batch_invariant=True, **options)


@pytest.fixture(scope="module")
def modules(small):
    return [DeepseekV4ForCausalLM(small[1], rngs=nnx.Rngs(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def answers(modules, wide):
    """answers(i, [(prompt, n), ..]) -> for each prompt the n tokens and their log-probabilities of model i.

    They come from an engine made with model i. The log-probabilities tell models apart, and rows of a cache that other
    weights wrote.
    """
    engines = [make(module, wide()) for module in modules]
    known = {}

    def of(i, asked):
        keys = [(i, tuple(prompt), n) for prompt, n in asked]
        requests = {key: add(engines[i], list(key[1]), key[2]) for key in keys if key not in known}
        drain(engines[i], most=4000)
        known.update({key: given(request) for key, request in requests.items()})
        return [known[key] for key in keys]

    return of


@pytest.fixture(scope="module")
def answer(answers):
    """answer(i, prompt) -> what `answers` has for one prompt."""
    return lambda i, prompt, n=NEW_TOKENS: answers(i, [(prompt, n)])[0]


def add(engine, prompt, n=NEW_TOKENS):
    return engine.add(prompt, max_new_tokens=n, sampling=WARM, seed=3)


def given(request, start=0):
    """Returns a request's new tokens from number `start` on, and their log-probabilities."""
    return request.generated[start:], request.logprobs[start:]


def run(engine, prompt):
    """Returns ((tokens, log-probabilities), number of tokens that were cached)."""
    request = add(engine, prompt)
    drain(engine)
    return given(request), request.cached_tokens


@pytest.mark.parametrize(
    ("small", "swaps", "overlap"),
    [
        ("v4", 24, True),
        pytest.param("v41", 24, True, marks=pytest.mark.slow),
        pytest.param("v4", 120, True, marks=pytest.mark.slow),
        pytest.param("v4", 120, False, marks=pytest.mark.slow),
    ],
    indirect=["small"],
)
def test_random_swaps_compile_nothing_and_hit_nothing_stale(modules, wide, answers, untyped, swaps, overlap):
    """Requests run, wait, are preempted and forked meanwhile. Those not kept get a new engine's tokens."""
    manager = wide(11)
    rng = np.random.default_rng(swaps)
    engine = make(modules[0], manager, prefix=PrefixCache(manager, key="model"), overlap=overlap)
    engine.warm_up()
    compiled = engine.metrics.compilations, [program._cache_size() for program in PROGRAMS]
    now = 0
    started = {}  # {request: number of tokens before its last swap, None = it was kept}
    ended = ([], [], [])  # by model: ((prompt, number of tokens), what the request was given) since its last swap
    hits = 0
    for _ in range(swaps):
        for _ in range(min(rng.integers(5), 12 - len(engine.waiting))):
            started[add(engine, GROWING[rng.integers(len(GROWING))])] = 0
        for _ in range(rng.integers(24)):
            engine.step()
        if (answering := [request for request in engine.running if request.num_generated]) and rng.integers(2) == 0:
            (child,) = engine.fork(answering[0], [3])
            started[child] = started[answering[0]]
        for request in [request for request in started if request.finish_reason]:
            hits += request.cached_tokens
            if (start := started.pop(request)) is not None:
                asked = (request.prompt + request.generated[:start], NEW_TOKENS - start)
                ended[now].append((asked, given(request, start)))
        now = int(rng.integers(3))
        running = str(rng.choice(["keep", "recompute"]))
        engine.update_weights(modules[now], running=running)
        assert engine.prefix.metrics.blocks == 0
        started = {r: None if running == "keep" else r.num_generated for r in started if not r.finish_reason}
    drain(engine)
    for number, pairs in enumerate(ended):
        assert answers(number, [asked for asked, _ in pairs]) == [found for _, found in pairs]
    assert sum(map(len, ended)) > swaps / 4 and hits > 0 and engine.metrics.preemptions > 0
    assert (engine.metrics.compilations, [program._cache_size() for program in PROGRAMS]) == compiled
    assert manager.free_slots == 3 and manager.free_blocks == 11 - engine.prefix.metrics.blocks


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_requests_go_on_as_the_caller_chose(modules, wide, answer, running):
    engine = make(modules[0], wide())
    request = add(engine, PROMPTS[0])
    while request.num_generated < 4:
        engine.step()
    engine.step()
    engine.update_weights(modules[1], running=running)
    before = request.generated
    number = request.num_generated
    assert given(request) == tuple(x[:number] for x in answer(0, PROMPTS[0])) and number < NEW_TOKENS
    length = engine.manager.length(request.slot) if request.slot >= 0 else 0
    assert length == (len(request.tokens) - 1 if running == "keep" else 0)
    outputs = [token for output in engine.step() for token in output.tokens]
    drain(engine)
    assert outputs[:1] == before[-1:]  # of the step that ran already
    rest = answer(1, PROMPTS[0] + before, NEW_TOKENS - number)
    assert (given(request, number) == rest) == (running == "recompute")


def test_what_began_with_other_weights_is_not_cached(modules, wide, answer):
    """Kept requests, their forks, and those that are preempted before or after: no block of theirs is ever hit."""
    manager = wide()
    engine = make(modules[0], manager, prefix=PrefixCache(manager, key="model"))
    request = add(engine, PROMPTS[0])
    while not request.num_generated:
        engine.step()
    engine.update_weights(modules[1], running="keep")
    engine.fork(request, [3])
    offloaded, cache = offload(manager, engine.cache, request.slot)
    request.slot, engine._scheduler.cache = resume(manager, cache, offloaded)
    drain(engine)
    assert engine.prefix.metrics.blocks == 0
    assert run(engine, PROMPTS[0]) == (answer(1, PROMPTS[0]), 0)
    assert run(engine, PROMPTS[0]) == (answer(1, PROMPTS[0]), 48)


def test_a_module_that_was_updated_is_given_again(modules, wide, answer):
    """As for any array of a pytree: `nnx.update` replaces the module's arrays, not the engine's."""
    module = nnx.clone(modules[0])
    engine = make(module, wide())
    nnx.update(module, nnx.state(modules[1]))
    assert run(engine, PROMPTS[0])[0] == answer(0, PROMPTS[0])
    engine.update_weights(module)
    assert run(engine, PROMPTS[0])[0] == answer(1, PROMPTS[0])


@pytest.mark.parametrize("place", ["host", "device", pytest.param("committed at first", marks=pytest.mark.slow)])
def test_arrays_that_lie_elsewhere_are_moved(modules, wide, answer, place):
    device = jax.devices()[0]
    at_first = jax.device_put(modules[0], device) if place == "committed at first" else modules[0]
    engine = make(at_first, wide())
    for _ in range(2):
        run(engine, PROMPTS[0])
    before = engine.metrics.compilations
    moved = dict(host=lambda: jax.tree.map(np.asarray, modules[1]), device=lambda: jax.device_put(modules[1], device))
    engine.update_weights(moved.get(place, lambda: modules[1])())
    assert run(engine, PROMPTS[0])[0] == answer(1, PROMPTS[0]) and engine.metrics.compilations == before


def test_prefixes_on_disk_belong_to_their_weights(modules, wide, answer, tmp_path):
    manager = wide()
    prefix = PrefixCache(manager, key="zero", files=PrefixFiles(tmp_path, "100MB"))
    engine = make(modules[0], manager, prefix=prefix)
    prompt = PROMPTS[1]
    assert run(engine, prompt) == (answer(0, prompt), 0)
    for key, message in ((None, "key=None: prefixes on disk need"), ("zero", "key='zero' is the name of the weights")):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(modules[1], key=key)
    assert run(engine, prompt) == (answer(0, prompt), 64)
    engine.update_weights(modules[1], key="one")
    assert run(engine, prompt) == (answer(1, prompt), 0)
    prefix.files.flush()
    engine.update_weights(modules[0], key="zero")
    assert run(engine, prompt) == (answer(0, prompt), 64) and prefix.metrics.files.hit_tokens == 64


def test_a_second_prefix_cache_takes_the_place_of_the_first(modules, wide, answer):
    manager = wide()
    old = make(modules[0], manager, prefix=PrefixCache(manager, key="step 0"))
    run(old, PROMPTS[0])
    prefix = PrefixCache(manager, key="step 1")
    assert old.prefix.metrics.blocks == 0 and manager.free_blocks == 36
    engine = make(modules[1], manager, cache=old.cache, prefix=prefix)
    assert run(engine, PROMPTS[0]) == (answer(1, PROMPTS[0]), 0)
    assert run(engine, PROMPTS[0]) == (answer(1, PROMPTS[0]), 48)
    with pytest.raises(ValueError, match="a later one has taken its place"):
        make(modules[0], manager, prefix=old.prefix)
    add(old, PROMPTS[0])
    with pytest.raises(ValueError, match="another PrefixCache of the manager has taken the place"):
        old.step()


def test_models_of_another_structure_are_refused_by_name(modules, wide, answer, small, untyped):
    manager = wide()
    engine = make(modules[0], manager, prefix=PrefixCache(manager, key="model"))
    request = add(engine, PROMPTS[0])
    engine.step()
    single = jax.tree.map(lambda x: x.astype(jnp.float32) if x.shape == (160, 64) else x, modules[1])
    fewer = DeepseekV4ForCausalLM(small[1].first_layers(2), rngs=nnx.Rngs(0))
    donated = jax.tree.map(jnp.copy, modules[1])
    jax.tree.leaves(donated)[0].delete()
    for model, options, message in (
        (single, {}, r"\w+\.weight\S+ is float32\[160, 64\] in the new model and bfloat16\[160, 64\] in the engine's"),
        (fewer, {}, r"layers\S+ is \S+ in the new model and .* in the engine's"),
        (donated, {}, r"\S+ of the new model has no values: it is a shape, or was deleted or donated"),
        (jax.eval_shape(lambda: modules[1]), {}, r"\S+ of the new model has no values: it is a shape, or was deleted"),
        (modules[1], dict(running="drop"), "running='drop' must be 'recompute' or 'keep'"),
        (modules[1], dict(key="model"), "key='model' is the name of the weights so far"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(model, **options)
    drain(engine)
    assert given(request) == answer(0, PROMPTS[0]) and engine.metrics.restarts == 0
    assert run(engine, PROMPTS[0]) == (answer(0, PROMPTS[0]), 48)


def test_an_engine_does_not_change_the_weights_of_another(modules, wide, answer):
    """Two engines may share a `CompiledModel`."""
    shared = CompiledModel(modules[0])
    first, second = (make(shared, wide()) for _ in range(2))
    first.update_weights(modules[1])
    assert run(first, PROMPTS[0])[0] == answer(1, PROMPTS[0])
    assert run(second, PROMPTS[0])[0] == answer(0, PROMPTS[0])
