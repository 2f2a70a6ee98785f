"""What the engine refuses, and that nothing is changed then; compiles nothing."""

import math

import pytest

from dsv4_jax.engine import Engine, PromptLookup, generate, n_best, requests, stream


def make(small, manager, **options):
    return Engine(small[0], manager, **dict(token_budget=20, drafter=PromptLookup()) | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[160]), r"prompt\[0\]=160 is outside the vocabulary"),
        (dict(prompt=[1] * 100, max_new_tokens=94), "need room for 193 tokens, max_context=192"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(priority=-1), "priority=-1 must be at least 0"),
        (dict(id="taken"), "id='taken' belongs to a request that has not finished"),
    ],
)
def test_bad_requests_change_nothing(small, roomy, options, message):
    engine = make(small, roomy)
    engine.add([1], max_new_tokens=2, id="taken")
    with pytest.raises(ValueError, match=message):
        engine.add(**dict(prompt=[1, 2], max_new_tokens=4) | options)
    assert len(engine.waiting) == 1 and engine.metrics.added == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sampling=0.8), r"sampling=0.8 must be a SamplingParams, such as SamplingParams\(temperature=0.8\)"),
        (dict(sampling=None), "sampling=None must be a SamplingParams"),
        (dict(sampling=dict(temperature=1.0)), "sampling={'temperature': 1.0} must be a SamplingParams"),
        (dict(seed=math.nan), "seed=nan must be a whole number"),
        (dict(seed="a"), "seed='a' must be a whole number"),
        (dict(priority=math.nan), "priority=nan must be a whole number"),
        (dict(max_new_tokens=2.5), "max_new_tokens=2.5 must be a whole number"),
        (dict(stop_tokens="ab"), r"stop_tokens\[0\]='a' must be a whole number"),
        (dict(stop_tokens=[1, 2.0]), r"stop_tokens\[1\]=2.0 must be a whole number"),
        (dict(stop_tokens=5), "stop_tokens=5 must be a sequence of token ids"),
        (dict(stop_tokens=iter([5])), "stop_tokens=.* must be a sequence of token ids"),
        (dict(prompt_logprobs=2), "prompt_logprobs=2 must be True or False; top_logprobs is a number"),
        (dict(id=[1]), r"id=\[1\] must be hashable"),
        (dict(grammar="[a-z]+"), r"grammar='\[a-z\]\+' must be compiled, see dsv4_jax.engine.grammar.Grammar"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_arguments_of_another_kind_change_nothing(small, roomy, options, message):
    """Accepted, they would make every later step raise, for all requests."""
    engine = make(small, roomy)
    with pytest.raises(TypeError, match=message):
        engine.add([1, 2], **dict(max_new_tokens=4) | options)
    assert not engine.busy and engine.metrics.added == 0
    if "sampling" in options:
        with pytest.raises(TypeError, match=message):
            n_best(small[0], roomy, [1], n=2, max_new_tokens=4, **options)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", ["token_budget", "draft_tokens"])
def test_sizes_of_another_kind_are_refused(small, roomy, name):
    with pytest.raises(TypeError, match=f"{name}=3.0 must be a whole number"):
        make(small, roomy, **{name: 3.0})


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", ["batch_invariant", "overlap", "structured_output"])
def test_options_that_are_neither_on_nor_off_are_refused(small, roomy, name):
    with pytest.raises(TypeError, match=f"{name}='no' must be True or False"):
        make(small, roomy, **{name: "no"})


@pytest.mark.usefixtures("untyped")
def test_a_fork_with_a_bad_seed_changes_nothing(small, roomy):
    engine = make(small, roomy)
    request = engine.add([1, 2], max_new_tokens=4, seed=-1)
    assert request.params.seed == 2**32 - 1
    with pytest.raises(TypeError, match="seed=0.5 must be a whole number"):
        engine.fork(request, [3, 0.5])
    with pytest.raises(TypeError, match=r"seeds=3 must be a sequence with a seed for each new request, such as \[3\]"):
        engine.fork(request, 3)
    assert engine.waiting == (request,) and engine.metrics.restarts == 0


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("options", [dict(seed="a"), dict(drafts="a"), dict(drafts=1.0)])
def test_numbers_of_another_kind_are_refused_by_generate(small, roomy, options):
    ((name, value),) = options.items()
    for run in generate, lambda *args, **options: next(stream(*args, **options)):
        with pytest.raises(TypeError, match=f"{name}={value!r} must be a whole number"):
            run(small[0], roomy, [[1, 2]], max_new_tokens=2, **options)


def test_numbers_that_are_ids_are_not_given_again(small, roomy):
    engine = make(small, roomy)
    engine.add([1], max_new_tokens=2, id=1)
    made = [engine.add([1], max_new_tokens=2) for _ in range(2)]
    made += engine.fork(made[0], [1])
    assert len({request.id for request in (*engine.waiting, *made)}) == 4


def test_the_tokens_of_a_request_cannot_be_written(small, roomy):
    request = make(small, roomy).add([1, 2], max_new_tokens=4)
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 5
    request.extend([7], [0.0])
    assert request.tokens.tolist() == [1, 2, 7]


def test_a_long_queue_is_not_sorted_for_each_request(small, roomy, monkeypatch):
    engine = make(small, roomy)
    compared = []
    for i in range(300):
        engine.add([1], max_new_tokens=2, priority=i % 7)
    rank = requests.Request.rank.fget
    monkeypatch.setattr(requests.Request, "rank", property(lambda r: compared.append(r) or rank(r)))
    added = engine.add([1], max_new_tokens=2, priority=3)
    assert len(compared) < 20
    engine.cancel(added)
    waiting = [(-r.params.priority, r.order) for r in engine.waiting]
    assert waiting == sorted(waiting) and len(waiting) == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(token_budget=0), "token_budget=0 must be at least 12: 4 for each of 3 requests"),
        (dict(draft_tokens=4), "draft_tokens=4 must be .* the manager's max_query_tokens=4 allows up to 3"),
        (dict(draft_tokens=-1), "draft_tokens=-1 must be"),
        (dict(draft_tokens=0), "draft_tokens=0 must be"),
        (dict(drafter=None, draft_tokens=2), "0 without a drafter"),
        (dict(min_confidence=0.5), "min_confidence=0.5 needs drafter='model'"),
    ],
)
def test_bad_engines_are_refused(small, roomy, options, message):
    with pytest.raises(ValueError, match=message):
        make(small, roomy, **options)
    roomy.admit()
    with pytest.raises(ValueError, match=r"must hold no requests, but slots \[0\] are admitted"):
        make(small, roomy)
