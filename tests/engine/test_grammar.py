"""Requests whose tokens follow a grammar, beside others, on a model that knows nothing of JSON."""

import dataclasses
import json
from random import Random

import chex
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from dsv4_jax.decode.sampling import SamplingParams, sample
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.engine.grammar import token_masks
from tests.decode.bigram import MODEL, DraftingBigram
from tests.engine.grammars import END, PIECES, VOCABULARY, text
from tests.host.managers import CONFIG, make


RECORD = dict(
    type="object",
    properties=dict(a=dict(type="integer"), b=dict(type="array", items=dict(type="boolean"), maxItems=3)),
    required=["a", "b"],
    additionalProperties=False,
)
TIGHT = RECORD | {"x-guidance": dict(whitespace_flexible=False)}
JSON = VOCABULARY.compile(f"start: %json {json.dumps(TIGHT)}")
DIGITS = VOCABULARY.compile("start: /[0-9]{1,4}/")


def run(engine, *, forks=2, **options):
    """Runs eight requests, of which each second one follows a grammar, and copies of one. Returns how they ended."""
    requests = []
    for i in range(8):
        sampling = SamplingParams(temperature=1.0) if i < 6 else SamplingParams()
        params = dict(sampling=sampling, seed=i, stop_tokens=(END,), grammar=(None, JSON, None, DIGITS)[i % 4])
        requests.append(engine.add([i, 5, 9], max_new_tokens=60, **params, **options))
    while not requests[1].generated:
        engine.step()
    requests += engine.fork(requests[1], range(forks)) if forks else []
    while engine.busy:
        engine.step()
    return [(request.params.grammar, request.generated, request.finish_reason) for request in requests]


@pytest.fixture(scope="module")
def expected():
    return run(Engine(MODEL, make(), token_budget=24, overlap=False))


def test_texts_follow_their_grammars(expected):
    for grammar, tokens, reason in expected:
        if grammar is JSON:
            record = json.loads(text(tokens))
            assert reason == "stop" and list(record) == ["a", "b"] and type(record["a"]) is int
            assert all(type(x) is bool for x in record["b"]) and len(record["b"]) <= 3
        elif grammar is DIGITS:
            assert reason == "stop" and text(tokens).isdigit() and len(text(tokens)) <= 4


@pytest.mark.parametrize("options", [dict(), dict(token_budget=8), dict(max_logprobs=2)], ids=str)
def test_overlap_changes_no_token(expected, options):
    engine = Engine(MODEL, make(), **dict(token_budget=24) | options)
    assert engine.config.overlap
    assert run(engine, top_logprobs=options.get("max_logprobs", 0)) == expected


def test_threads_find_the_same_masks(monkeypatch):
    masks = []
    for cores in (2, 4):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        masks.append(token_masks([(JSON.start(), 2, ()), (DIGITS.start(), 0, ())], 4, VOCABULARY.size))
    chex.assert_trees_all_equal(*masks)
    assert (masks[0][[1, 3]] == 2**32 - 1).all() and len(np.unique(masks[0], axis=0)) == 3


def test_drafts_change_no_token(expected):
    """Those that the grammar does not allow are refused."""
    engine = Engine(MODEL, make(), token_budget=24, drafter=PromptLookup())
    assert run(engine) == expected and engine.metrics.drafted_tokens > engine.metrics.accepted_tokens > 0


def test_drafts_on_the_device_change_no_token(expected):
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    engine = Engine(DraftingBigram(MODEL.table), make(config), token_budget=24, drafter="model")
    assert run(engine, forks=0) == expected[:8] and engine.metrics.accepted_tokens


def test_other_requests_are_not_touched(expected):
    engine = Engine(MODEL, make(), token_budget=24)
    params = dict(max_new_tokens=60, stop_tokens=(END,))
    plain = [engine.add([i, 5, 9], seed=i, sampling=SamplingParams(temperature=1.0), **params) for i in (0, 2, 4)]
    while engine.busy:
        engine.step()
    assert [(None, r.generated, r.finish_reason) for r in plain] == [expected[i] for i in (0, 2, 4)]


def test_a_step_that_fails_is_run_again(expected, monkeypatch):
    """Matchers begin anew with the tokens that their requests have."""
    engine = Engine(MODEL, make(), token_budget=24)
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) in (3, 9):
            raise KeyboardInterrupt
        return token_masks(*args)

    monkeypatch.setattr("dsv4_jax.engine.grammar.token_masks", fail)
    step = engine.step

    def step_on():
        try:
            return step()
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(engine, "step", step_on)
    assert run(engine) == expected and engine.metrics.restarts == 2


def test_a_grammar_that_cannot_go_on_ends_its_request_only(expected):
    engine = Engine(MODEL, make(), token_budget=24)
    params = dict(max_new_tokens=60, stop_tokens=(END,))
    request = engine.add([3, 5, 9], grammar=DIGITS, **params)
    other = engine.add([6, 5, 9], seed=6, **params)
    engine.step()
    request.matcher.read([0] * 9)  # no text has nine digits
    while engine.busy:
        engine.step()
    assert request.finish_reason == "error" and "its grammar cannot go on" in str(request.error)
    assert (None, other.generated, other.finish_reason) == expected[6]


def test_nothing_is_compiled_after_the_warm_up():
    engine = Engine(MODEL, make(), token_budget=24, structured_output=True)
    engine.warm_up()
    count = engine.metrics.compilations
    run(engine)
    assert engine.metrics.compilations == count


def test_masks_hold_for_every_way_to_sample():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((40, CONFIG.vocab_size))
    allowed = rng.random((40, CONFIG.vocab_size)) < 0.1
    allowed[:, 3] = True
    masks = np.packbits(np.pad(allowed, [(0, 0), (0, -CONFIG.vocab_size % 32)]), axis=1, bitorder="little")
    for params in (SamplingParams(), SamplingParams(2.0), SamplingParams(2.0, top_k=5), SamplingParams(2.0, top_p=0.5)):
        seeds = jnp.arange(40, dtype=jnp.uint32)
        positions = jnp.arange(40, dtype=jnp.int32)
        tokens = sample(jnp.asarray(logits, jnp.float32), params, seeds, positions, jnp.asarray(masks.view(np.uint32)))
        assert allowed[np.arange(40), np.asarray(tokens)].all()


def random_schema(random, depth=3):
    """A JSON schema with most of the keywords that llguidance supports."""
    low = random.randint(-20, 20)

    def nested():
        return random_schema(random, depth - 1)

    kinds = [
        lambda: dict(type="integer", minimum=low, maximum=low + random.randint(0, 300)),
        lambda: dict(type="number", minimum=low, exclusiveMaximum=low + 0.5),
        lambda: dict(type="string", minLength=random.randint(0, 3), maxLength=random.randint(3, 8)),
        lambda: dict(type="string", pattern=random.choice(["^[a-c]{2}[0-9]*$", "x|yz", "^(ab)+$"])),
        lambda: dict(type="string", format=random.choice(["date", "time", "uuid", "ipv4"])),
        lambda: dict(enum=random.sample([None, True, 3, 2.5, "a", [1], dict(b="c")], random.randint(1, 4))),
        lambda: dict(const=random.choice([0, "x y", [], dict(a=[None])])),
        lambda: dict(type=random.sample(["null", "boolean"], random.randint(1, 2))),
    ]
    if depth:
        names = random.sample(["a", "b", "x y", '"', "0"], random.randint(0, 4))
        kinds += 2 * [
            lambda: dict(
                type="object",
                properties={name: nested() for name in names},
                required=random.sample(names, random.randint(0, len(names))),
                additionalProperties=random.choice([False, dict(type="boolean")]),
            ),
            lambda: dict(type="array", items=nested(), minItems=random.randint(0, 2), maxItems=random.randint(2, 4)),
            lambda: dict(type="array", prefixItems=[nested(), nested()], items=False, minItems=1),
            lambda: dict(anyOf=[nested(), nested()]),
        ]
    schema = random.choice(kinds)()
    if depth == 3 and random.random() < 0.2:
        schema = {"$defs": dict(x=schema), "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}
    return schema


def random_text(grammar, rng):
    """Draws tokens that the masks allow, and rather those that end something; None if there were too many."""
    matcher = grammar.start()
    tokens = []
    while len(tokens) < 1000:
        (mask,) = token_masks([(matcher, 0, ())], 1, VOCABULARY.size)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: VOCABULARY.size])
        ends = [token for token in allowed if token == END or PIECES[token][0] in '}]",:']
        token = int(rng.choice(ends if ends and rng.random() < 0.4 else allowed))
        if token == END:
            return text(tokens)
        matcher.read([token])
        assert not matcher.error
        tokens.append(token)
    return None


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_texts_of_schemas_are_valid(count):
    random = Random(count)
    rng = np.random.default_rng(count)
    found = 0
    for _ in range(count):
        schema = random_schema(random)
        words = random_text(VOCABULARY.json_schema(schema), rng)
        if words is not None:
            jsonschema.validate(json.loads(words), schema)
            found += 1
    assert found > 0.9 * count


def test_mistakes_are_named():
    engine = Engine(MODEL, make(), token_budget=24)
    with pytest.raises(ValueError, match=r"stop_tokens=\(1,\) must have one of \(\d+,\)"):
        engine.add([1], max_new_tokens=4, grammar=DIGITS, stop_tokens=[1])
    with pytest.raises(ValueError, match="no_such_rule"):
        VOCABULARY.compile("start: no_such_rule")
    with pytest.raises(ValueError, match="minLength"):
        VOCABULARY.json_schema(dict(type="string", minLength=-1))
