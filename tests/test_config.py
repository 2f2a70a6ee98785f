"""DSV4Config: both spellings of config.json, refusals, presets, RoPE frequencies."""

import copy
import dataclasses
import json
import math
import warnings

import chex
import numpy as np
import pytest
from hypothesis import given, strategies as st

import dsv4_jax.config
from dsv4_jax.cache import CacheSchema
from dsv4_jax.config import DSV4Config, LayerSpec, RopeScaling
from dsv4_jax.config.config_json import release_config
from dsv4_jax.config.layer_spec import CSA, HCA, LAYER_TYPES, SLIDING, numbered
from tests.paths import DATA, TINY


MODERN = json.loads((DATA / "hf_tiny" / "config.json").read_text())
MODERN_ONLY = ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")
RAW = {key: value for key, value in MODERN.items() if key not in MODERN_ONLY} | {
    "compress_ratios": [0, 4, 16, 4, 16, 0],
    "num_hash_layers": 1,
    "qk_rope_head_dim": 8,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def changed(base, path, value):
    """A copy of a config with the field at a dotted path replaced."""
    result = copy.deepcopy(base)
    *parents, last = path.split(".")
    target = result
    for parent in parents:
        target = target[parent]
    target[last] = value
    return result


def test_spellings_give_equal_configs():
    modern = DSV4Config.from_hf(MODERN)
    raw = DSV4Config.from_hf(RAW)
    assert modern == raw
    assert hash(modern) == hash(raw)
    assert DSV4Config.from_hf(MODERN | RAW) == raw
    assert raw.layer_types == (SLIDING, CSA, HCA, CSA, HCA)
    assert [raw.compress_rate(layer) for layer in range(5)] == [0, 4, 16, 4, 16]
    assert raw.mlp_layer_types == ("hash_moe", "moe", "moe", "moe", "moe")
    assert (raw.qk_rope_head_dim, raw.nope_head_dim, raw.eos_token_id) == (8, 24, (1,))
    assert raw.rope_scaling == RopeScaling(16.0, 64, 32.0, 1.0)


def test_ratio_1_is_sliding_and_the_tail_is_ignored():
    assert DSV4Config.from_hf(RAW | {"compress_ratios": [1, 4, 16, 4, 16, 0, 0, 7]}) == DSV4Config.from_hf(RAW)


def test_partial_rotary_factor_alone_gives_the_rope_width():
    config = {key: value for key, value in MODERN.items() if key != "qk_rope_head_dim"}
    assert DSV4Config.from_hf(config) == DSV4Config.from_hf(RAW)


def test_thetas_may_stand_in_either_place():
    inside = {key: value for key, value in MODERN.items() if key not in ("rope_theta", "compress_rope_theta")}
    assert DSV4Config.from_hf(inside) == DSV4Config.from_hf(RAW)
    outside = copy.deepcopy(MODERN)
    del outside["rope_parameters"]["main"]["rope_theta"]
    assert DSV4Config.from_hf(outside) == DSV4Config.from_hf(RAW)
    del outside["rope_theta"]
    with pytest.raises(ValueError, match="lacks rope_theta or rope_parameters.main.rope_theta"):
        DSV4Config.from_hf(outside)


def test_without_hca_layers_there_is_no_hca_rate():
    raw = DSV4Config.from_hf(RAW | {"compress_ratios": [0, 4, 0, 4, 0]})
    modern = DSV4Config.from_hf(MODERN | {"layer_types": [SLIDING, CSA, SLIDING, CSA, SLIDING]})
    assert raw == modern
    assert {group for spec in raw.layers if (group := spec.group)} == {"csa4"}


def test_the_release_may_have_layers_of_several_rates():
    config = DSV4Config.from_hf(RAW | {"compress_ratios": [0, 4, 16, 2, 16]})
    assert (
        config.specs[2:]
        == DSV4Config.small([LayerSpec()] * 2 + [LayerSpec.hca(rate) for rate in (16, 2, 16)]).specs[2:]
    )
    assert release_config(config)["compress_ratios"] == [0, 4, 16, 2, 16]


def test_no_yarn():
    default = {"rope_type": "default", "rope_theta": 160000.0, "partial_rotary_factor": 0.25}
    raw = RAW | {"rope_scaling": None}
    modern = changed(MODERN, "rope_parameters.compress", default)
    assert DSV4Config.from_hf(raw) == DSV4Config.from_hf(modern)
    expected = np.float32(1) / np.float32(160000) ** (np.arange(0, 8, 2, dtype=np.float32) / np.float32(8))
    chex.assert_trees_all_equal(DSV4Config.from_hf(raw).inv_freq(1), expected)


@pytest.mark.parametrize("eos, expected", [(None, ()), (7, (7,)), ([1, 7], (1, 7))])
def test_eos_token_ids(eos, expected):
    assert DSV4Config.from_hf(RAW | {"eos_token_id": eos}).eos_token_id == expected


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
def test_token_ids_are_int32(name):
    with pytest.raises(ValueError, match=f"{name}=1099511627776 must be at most 2147483647"):
        DSV4Config.from_hf(RAW | {name: 1 << 40})


def test_reads_a_folder_or_a_file():
    assert DSV4Config.from_hf(DATA / "hf_tiny") == DSV4Config.from_hf(MODERN)
    assert DSV4Config.from_hf(str(DATA / "hf_tiny" / "config.json")) == DSV4Config.from_hf(MODERN)
    assert DSV4Config.from_hf(TINY).head_dim == 96


@pytest.mark.parametrize("base", [RAW, MODERN], ids=["raw", "modern"])
def test_every_layout_field_is_required(base):
    tokens = {"bos_token_id", "eos_token_id", "num_nextn_predict_layers", "tie_word_embeddings"}  # optional
    two_spellings = {"qk_rope_head_dim", "rope_theta", "compress_rope_theta"}
    fields = {field.name for field in dataclasses.fields(DSV4Config)} & set(base) - tokens - two_spellings
    assert len(fields) > 20
    for field in sorted(fields):
        with pytest.raises(ValueError, match=rf"lacks .*{field}"):
            DSV4Config.from_hf({key: value for key, value in base.items() if key != field})
        if field != "rope_scaling":  # null: no YaRN
            with pytest.raises(ValueError, match=rf"lacks .*{field}"):
                DSV4Config.from_hf(base | {field: None})


@pytest.mark.parametrize(
    "key",
    ["compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "rope_theta", "compress_rope_theta"],
)
def test_every_fact_of_the_raw_spelling_is_required(key):
    with pytest.raises(ValueError, match=rf"lacks {key} or "):
        DSV4Config.from_hf({name: value for name, value in RAW.items() if name != key})


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(ValueError) as error:
        DSV4Config.from_hf({"model_type": "deepseek_v4"})
    for name in ("vocab_size", "hc_eps", "compress_ratios or layer_types", "num_hash_layers", "scoring_func"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("compress_ratios", [0, 4, 16, 4, 4], r"the layers' types: compress_ratios = .*, layer_types = "),
        (
            "compress_ratios",
            [0, 4, 32, 4, 32],
            r"the layers' rates: compress_ratios = \(0, 4, 32, .*, compress_rates = \(0, 4, 16, ",
        ),
        ("num_hash_layers", 2, r"the MLPs' types: num_hash_layers = .*, mlp_layer_types = "),
        ("qk_rope_head_dim", 16, r"on qk_rope_head_dim: qk_rope_head_dim = 16, partial_rotary_factor \* head_dim = 8"),
        ("rope_theta", 500, r"rope_theta: rope_theta = 500, rope_parameters.main.rope_theta = 10000.0"),
        ("compress_rope_theta", 40000, r"compress_rope_theta = 40000, rope_parameters.compress.rope_theta = 160000.0"),
        (
            "rope_scaling.factor",
            40,
            r"YaRN: rope_parameters.compress = .*factor=16.0.*, rope_scaling = .*40.0",
        ),
        ("rope_scaling", None, None),
        ("rope_parameters.main.partial_rotary_factor", 0.5, r"on qk_rope_head_dim: qk_rope_head_dim = 8, .* = 16"),
    ],
)
def test_contradicting_spellings_are_refused(path, value, message):
    both = changed(RAW | MODERN, path, value)
    if message is None:  # a null next to the other spelling says nothing
        assert DSV4Config.from_hf(both) == DSV4Config.from_hf(RAW)
        return
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(both)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("model_type", "deepseek_v5", "model_type='deepseek_v5'"),
        ("model_type", None, "model_type=None"),
        ("compress_ratios", [0, 4, -16, 4, 16], r"compress_ratios\[2\]=-16"),
        ("compress_ratios", [0, 4, 16.0, 4, 16], r"compress_ratios\[2\]=16.0"),
        ("compress_ratios", [0, 4, True, 4, 16], r"compress_ratios\[2\]=True"),
        ("compress_ratios", [0, 4, 16, 4], "compress_ratios has 4 entries, but num_hidden_layers=5"),
        ("compress_ratios", 4, "compress_ratios=4"),
        ("num_hash_layers", -1, "num_hash_layers=-1"),
        ("num_hash_layers", 6, r"num_hash_layers=6 must be at most 5"),
        ("scoring_func", "sigmoid", "scoring_func='sigmoid'"),
        ("num_key_value_heads", 2, "num_key_value_heads=2"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings='yes'"),
        ("hidden_act", "gelu", "hidden_act='gelu'"),
        ("attention_bias", True, "attention_bias=True"),
        ("hidden_size", 0, "hidden_size=0"),
        ("hidden_size", "64", "hidden_size='64'"),
        ("hidden_size", 64.0, "hidden_size=64.0"),
        ("num_hidden_layers", True, "num_hidden_layers=True"),
        ("head_dim", 10**400, "head_dim=1000.* at most 2147483647"),
        ("hc_mult", 0, "hc_mult=0"),
        ("n_routed_experts", 2 * 10**9, "n_routed_experts=2000000000 .* at most 65536"),
        ("index_topk", 2 * 10**9, "index_topk=2000000000 .* at most 1048576"),
        ("sliding_window", 2 * 10**9, "sliding_window=2000000000 .* at most 1048576"),
        ("hc_sinkhorn_iters", 2 * 10**9, "hc_sinkhorn_iters=2000000000 .* at most 65536"),
        ("hc_sinkhorn_iters", -1, "hc_sinkhorn_iters=-1"),
        ("hc_eps", -1e-6, "hc_eps=-1e-06"),
        ("rms_norm_eps", math.nan, "rms_norm_eps=nan"),
        ("swiglu_limit", 10**400, "swiglu_limit=1000"),
        ("qk_rope_head_dim", 7, r"qk_rope_head_dim=7 must be even"),
        ("qk_rope_head_dim", 34, r"qk_rope_head_dim=34 exceeds head_dim=32"),
        ("qk_rope_head_dim", 24, r"qk_rope_head_dim=24 exceeds index_head_dim=16"),
        ("o_groups", 3, r"num_attention_heads=4 must be a multiple of o_groups=3"),
        ("num_experts_per_tok", 9, r"num_experts_per_tok=9 exceeds n_routed_experts=8"),
        ("n_shared_experts", 2, "n_shared_experts=2"),
        ("rope_theta", 1, r"rope_theta=1.0"),
        ("rope_scaling.type", "linear", "rope_scaling.type='linear'"),
        ("rope_scaling.mscale", 1.0, "rope_scaling has mscale"),
        ("rope_scaling.attention_factor", 1.3, "attention_factor=1.3"),
        ("rope_scaling.factor", None, "lacks rope_scaling.factor"),
        ("rope_scaling.beta_slow", 32, r"beta_fast=32.0 must exceed beta_slow=32.0"),
        ("rope_scaling.original_max_position_embeddings", 6, "must be at least 2 pi beta_slow"),
        ("rope_scaling", [16], r"rope_scaling=\[16\]"),
        ("rope_scaling", {}, "rope_scaling.type=None"),
        ("eos_token_id", ["</s>"], "eos_token_id='</s>'"),
        ("bos_token_id", -1, "bos_token_id=-1"),
    ],
)
def test_impossible_values_are_refused(path, value, message, untyped):
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(changed(RAW, path, value))


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("layer_types", [SLIDING, CSA, "dense", CSA, HCA], r"layer_types\[2\]='dense' must be one of"),
        ("layer_types", [SLIDING, CSA], "layer_types names 2 layers, but num_hidden_layers=5"),
        ("mlp_layer_types", ["dense"] * 5, r"mlp_layer_types\[0\]='dense'"),
        (f"compress_rates.{CSA}", 8, rf"compress_rates.{CSA}=8: .*with_layers\(\[LayerSpec\.csa\(8\)"),
        (f"compress_rates.{HCA}", 4, f"compress_rates.{HCA}=4"),
        (f"compress_rates.{HCA}", 1, f"compress_rates.{HCA}=1"),
        (f"compress_rates.{CSA}", 0, f"compress_rates.{CSA}=0"),
        (f"compress_rates.{HCA}", -16, f"compress_rates.{HCA}=-16"),
        ("compress_rates", {CSA: 4}, f"lacks compress_rates.{HCA}"),
        ("compress_rates", [4, 16], r"compress_rates=\[4, 16\]"),
        ("rope_parameters", {"rope_type": "default"}, "rope_parameters.main=None"),
        ("rope_parameters.main.rope_type", "yarn", "config.json lacks rope_parameters.main.factor"),
        ("rope_parameters.main", RAW["rope_scaling"] | {"rope_theta": 10000.0}, "rope_parameters.main asks for YaRN"),
    ],
)
def test_impossible_values_of_the_modern_spelling_are_refused(path, value, message):
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(changed(MODERN, path, value))


def test_a_config_made_by_hand_is_checked_too(untyped):
    config = DSV4Config.from_hf(RAW)
    with pytest.raises(TypeError, match="positional argument"):
        DSV4Config(258, 64)
    with pytest.raises(ValueError, match="num_hidden_layers=0"):
        config.with_layers([])
    with pytest.raises(ValueError, match="mlp_layer_types names 5 layers, but num_hidden_layers=1"):
        dataclasses.replace(config, specs=(LayerSpec(),))
    with pytest.raises(ValueError, match="eos_token_id=7 must be a tuple"):
        dataclasses.replace(config, eos_token_id=7)
    with pytest.raises(ValueError, match="bos_token_id=-1"):
        dataclasses.replace(config, bos_token_id=-1)


def test_lists_become_tuples(untyped):
    config = DSV4Config.small([LayerSpec(), LayerSpec()], mlp_layer_types=["hash_moe", "moe"], eos_token_id=[1, 7])
    assert config.is_hashed(0) and not config.is_hashed(1)
    assert hash(config) == hash(dataclasses.replace(config, mlp_layer_types=("hash_moe", "moe"), eos_token_id=(1, 7)))


def test_layers_may_be_given_as_data():
    reader = LayerSpec.csa(8, owner=False, selection=1)
    layers = [LayerSpec(), LayerSpec.csa(8), LayerSpec.hca(32), LayerSpec.csa(8), reader]
    config = DSV4Config.small(layers=layers, sliding_window=24, num_nextn_predict_layers=1)
    assert [spec.compress_rate for spec in config.layers] == [0, 8, 32, 8, 8, 0]
    assert [(spec.layer, spec.index) for spec in config.layers[2:5]] == [(2, 0), (3, 1), (4, 0)]
    assert [spec.selects for spec in config.layers] == [False, True, False, True, False, False]
    assert [spec.kind for spec in config.layers] == [*layers, LayerSpec()]
    assert config.layer_types == (SLIDING, CSA, HCA, CSA, CSA)
    assert hash(config) != hash(DSV4Config.small(layers=layers)) and config.sliding_window == 24
    assert dataclasses.replace(config, hidden_size=128).layers == config.layers
    assert config.with_layers([LayerSpec()]).layers == (LayerSpec(0), LayerSpec(1))


def test_the_first_layers_keep_what_they_are():
    layers = [LayerSpec(window=9), LayerSpec.csa(8), LayerSpec.hca(64)]
    config = DSV4Config.small(layers)
    assert config.first_layers(3) == config
    assert config.first_layers(2) == DSV4Config.small(layers[:2])
    for count in (-1, 0, 4):
        with pytest.raises(ValueError, match=rf"count={count} must be at (least 1|most 3)"):
            config.first_layers(count)
    flash = DSV4Config.v4_flash_0731().first_layers(5)
    assert flash.specs == DSV4Config.v4_flash().specs[:5] and flash.mlp_layer_types == ("hash_moe",) * 3 + ("moe",) * 2
    assert flash.dspark is not None and flash.dspark.target_layer_ids == (2, 3, 4)


def test_sizes_of_a_layer():
    config = DSV4Config.small([LayerSpec(window=9), LayerSpec.csa(index_topk=3), LayerSpec.csa(window=40)])
    assert [config.window(layer) for layer in range(3)] == [9, 16, 40]
    assert [config.topk(layer) for layer in (1, 2)] == [3, 16]
    assert dataclasses.replace(config, sliding_window=8, index_topk=2).window(1) == 8
    assert len({spec.kind for spec in config.layers}) == 3


SAME = dict(window=16, index_topk=16)  # the configuration's own sizes


@pytest.mark.parametrize(
    ("layer", "ratio"),
    [
        (LayerSpec(), 0),
        (LayerSpec.csa(**SAME), 4),
        (LayerSpec.csa(group="mine"), 4),
        (LayerSpec.hca(2), 2),
        (LayerSpec.hca(), 128),
        (LayerSpec.csa(8), None),
        (LayerSpec.hca(4), None),
        (LayerSpec.hca(1), None),
        (LayerSpec(window=8), None),
        (LayerSpec.csa(index_topk=8), None),
        (LayerSpec.csa(owner=False), None),
        (LayerSpec.csa(selection=0), None),
        (LayerSpec.csa(selection=None), None),
        (LayerSpec.csa(key_compressor=False, group="b"), None),
    ],
)
def test_what_the_release_can_express(layer, ratio):
    """The others would be read as another layer of the same rate."""
    config = DSV4Config.small([LayerSpec.csa(), layer])
    if ratio is None:
        with pytest.raises(ValueError, match=r"the release's config.json cannot express layer 1: LayerSpec\(layer=1"):
            release_config(config)
    else:
        assert release_config(config)["compress_ratios"] == [4, ratio]
        read = DSV4Config.from_hf(release_config(config))
        assert [spec.layer_type for spec in read.layers] == [spec.layer_type for spec in config.layers]


CSA8 = LayerSpec.csa(8)


@pytest.mark.parametrize(
    "layers, message",
    [
        ([LayerSpec(compress_rate=8)], r"layers\[0\] has compress_rate=8 and group=None"),
        ([LayerSpec.csa(0)], r"layers\[0\] has compress_rate=0 and group='csa0'"),
        ([LayerSpec.hca(0)], r"layers\[0\] has compress_rate=0 and group='hca0'"),
        ([LayerSpec.hca(-4)], r"layers\[0\].compress_rate=-4 must be at least 0"),
        ([LayerSpec(owner=True)], r"layers\[0\] has no group, so it can have no attribute but its window"),
        ([LayerSpec(keys=True, selection=-1)], r"layers\[0\] has no group, so"),
        ([CSA8, LayerSpec(selection=0)], r"layers\[1\] has no group, so"),
        ([LayerSpec(), LayerSpec(0)], r"layers\[1\] is given as layer=0; leave the number out"),
        ([CSA8, LayerSpec.csa(8, index=3)], r"layers\[1\] has index=3, but stores row 1 of group 'csa8'"),
        ([LayerSpec.csa(8, owner=False)], r"layers\[0\] reads row 0 of group 'csa8', which no layer before it"),
        ([CSA8, LayerSpec.csa(8, owner=False, index=1)], r"layers\[1\] reads row 1 of group 'csa8'"),
        ([CSA8, LayerSpec.csa(8, owner=False, index=-1)], r"layers\[1\].index=-1 must be at least 0"),
        ([CSA8, LayerSpec.csa(8, selection=4)], "selection of layer 4, which is not an earlier indexer's"),
        ([LayerSpec(), CSA8, LayerSpec.csa(8, selection=-2)], "selection of layer -2, which is not an earlier"),
        ([CSA8, LayerSpec.csa(8, selection=0), LayerSpec.csa(8, selection=1)], "selection of layer 1, which is not"),
        (
            [LayerSpec.csa(2), LayerSpec.csa(4, selection=0)],
            r"layers\[1\] has entries of 4 tokens, but attends to the selection of layer 0, whose entries have 2",
        ),
        (
            [CSA8, LayerSpec.csa(4, group="csa8")],
            r"layers\[1\] has compress_rate=4, but group 'csa8' has compress_rate=8 in layers\[0\]",
        ),
        (
            [CSA8, LayerSpec.csa(4, group="csa8", owner=False, selection=None)],
            r"layers\[1\] has compress_rate=4, but group 'csa8' has compress_rate=8 in layers\[0\]",
        ),
        ([CSA8, LayerSpec.csa(8, owner=False, overlap=False)], r"layers\[1\] has overlap=False, but group 'csa8' has"),
        (
            [LayerSpec.hca(8), LayerSpec.hca(8, keys=True, owner=False, selection=-1)],
            r"layers\[1\] has keys=True, but group 'hca8' has keys=False in layers\[0\]",
        ),
        ([CSA8, LayerSpec.csa(8, key_compressor=False)], r"layers\[1\] has key_compressor=False, but group"),
        ([LayerSpec.hca(8, selection=-1)], r"layers\[0\] selects .* give keys=True"),
        ([LayerSpec.hca(8, key_compressor=True)], r"layers\[0\] selects entries .*, or pools them, .* give keys=True"),
        ([LayerSpec.hca(8, index_topk=4)], r"layers\[0\] has index_topk=4, but does not select entries itself"),
        ([CSA8, LayerSpec.csa(8, selection=0, index_topk=4)], r"layers\[1\] has index_topk=4, but does not select"),
        ([LayerSpec(window=0)], r"layers\[0\].window=0 must be at least 1"),
        ([LayerSpec.csa(window=2**20 + 1)], r"layers\[0\].window=1048577 must be at most 1048576"),
        ([LayerSpec.csa(index_topk=0)], r"layers\[0\].index_topk=0 must be at least 1"),
    ],
)
def test_layers_that_do_not_fit_together(layers, message):
    with pytest.raises(ValueError, match=message):
        DSV4Config.small(layers=layers)


def test_layers_are_specs_of_whole_numbers():
    with pytest.raises(TypeError, match=r"layers\[0\].window=True must be a whole number"):
        DSV4Config.small([LayerSpec(window=True)])
    with pytest.raises(TypeError, match=r"layers\[0\]='sliding_attention' must be a LayerSpec"):
        numbered(iter([SLIDING]))  # pyrefly: ignore[bad-argument-type]


def test_a_ring_is_no_choice():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ring'"):
        LayerSpec(ring=3)  # pyrefly: ignore[unexpected-keyword]


def test_the_repr_and_the_names_are_short():
    assert repr(DSV4Config.v4_flash()).startswith(
        "DSV4Config(2 window only, 21 csa4 of 4 tokens, 20 hca128 of 128 tokens; hidden_size=4096, "
    )
    schema = CacheSchema(DSV4Config.v4_flash(), num_blocks=8, max_requests=2, max_context=1024)
    assert len(repr(DSV4Config.v4_pro())) < 240 and len(repr(schema)) < 700
    assert dir(dsv4_jax.config) == [
        "DSV4Config", "DSparkConfig", "EngramConfig", "LayerSpec", "RopeScaling", "shared_specs",
    ]  # fmt: skip


def test_broken_files(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"cannot read the configuration .*config\.json"):
        DSV4Config.from_hf(tmp_path)
    text = json.dumps(RAW)
    for content in (text[: len(text) // 2], "", "\udcff", "[" * 100_000, "1" * 10_000):
        file.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"config\.json: its JSON is broken"):
            DSV4Config.from_hf(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="its JSON is no object but list"):
        DSV4Config.from_hf(file)


@given(
    st.dictionaries(
        st.sampled_from(sorted(MODERN | RAW)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from([CSA, HCA, "type"]), inner),
            max_leaves=6,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_junk_in_any_field_is_a_value_error_or_a_config(junk):
    for base in (RAW, MODERN):
        try:
            assert isinstance(DSV4Config.from_hf(base | junk), DSV4Config)
        except ValueError:
            pass


def test_unknown_keys_warn_once_and_known_ones_do_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DSV4Config.from_hf(RAW | {"dspark_block_size": 5, "quantization_config": {}, "expert_dtype": "fp4"})
    with pytest.warns(UserWarning, match="not used here: engram, vision_tower") as caught:
        DSV4Config.from_hf(RAW | {"vision_tower": {}, "engram": 1})
    assert len(caught) == 1


@pytest.mark.parametrize("preset, counts, hidden", [("v4_flash", (2, 21, 20), 4096), ("v4_pro", (0, 30, 31), 7168)])
def test_presets(preset, counts, hidden):
    config = getattr(DSV4Config, preset)()
    assert tuple(config.layer_types.count(kind) for kind in LAYER_TYPES) == counts
    assert config.mlp_layer_types.count("hash_moe") == 3
    assert (config.hidden_size, config.nope_head_dim) == (hidden, 448)
    assert (config.compress_rate(2), config.compress_rate(3)) == (4, 128)


def test_flash_preset_equals_the_released_config():
    release = RAW | {
        "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0], "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 512, "num_hash_layers": 3, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048, "max_position_embeddings": 1048576,
        "rope_scaling": RAW["rope_scaling"] | {"original_max_position_embeddings": 65536},
    }  # fmt: skip
    assert DSV4Config.from_hf(release) == DSV4Config.v4_flash()
    release |= {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42]}
    release |= {"dspark_markov_rank": 256, "num_nextn_predict_layers": 1}
    assert DSV4Config.from_hf(release, mtp=True) == DSV4Config.v4_flash_0731()
    assert DSV4Config.v4_flash_0731().with_drafts(False) == DSV4Config.v4_flash()


def test_the_block_of_multi_token_prediction_is_there_if_asked_for():
    raw = RAW | {
        "num_nextn_predict_layers": 1,
        "compress_ratios": [*RAW["compress_ratios"][: RAW["num_hidden_layers"]], 0],
    }
    config = DSV4Config.from_hf(raw, mtp=True)
    assert dataclasses.replace(config, num_nextn_predict_layers=0) == DSV4Config.from_hf(raw)
    block = config.layers[config.num_hidden_layers]
    assert (len(config.layers), block.layer, block.group) == (
        config.num_hidden_layers + 1,
        config.num_hidden_layers,
        None,
    )
    chex.assert_trees_all_equal(config.inv_freq(block.layer)[1], np.float32(1e4) ** (-2 / config.qk_rope_head_dim))
    assert not config.is_hashed(block.layer)
    for message, change in {
        "num_nextn_predict_layers is 0": {"num_nextn_predict_layers": 0},
        "num_nextn_predict_layers=2": {"num_nextn_predict_layers": 2},
        "lacks dspark_noise_token_id, dspark_target_layer_ids, dspark_markov_rank": {"dspark_block_size": 5},
        r"compress_ratios ends in \[4\]": {"compress_ratios": [*raw["compress_ratios"][:-1], 4]},
    }.items():
        with pytest.raises(ValueError, match=message):
            DSV4Config.from_hf(raw | change, mtp=True)


def yarn(dim, low, high):
    """dsv4.md 2.3 with given borders: theta 160000, factor 16."""
    freqs = np.float32(1) / np.float32(160000) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    smooth = np.float32(1) - ramp
    return freqs / np.float32(16) * (np.float32(1) - smooth) + freqs * smooth


@pytest.mark.parametrize(
    "config, borders",
    [
        (DSV4Config.v4_flash(), (15, 25)),
        (DSV4Config.from_hf(RAW), (0, 1)),  # 8 ln(64 / 2 pi) / (2 ln 160000) = 0.77; the fast border is below 0
        (DSV4Config.from_hf(TINY), (0, 4)),  # 32 ln(64 / 2 pi) / (2 ln 160000) = 3.1
    ],
    ids=["flash", "rope 8", "rope 32"],
)
def test_inv_freq(config, borders):
    dim = config.qk_rope_head_dim
    plain = np.float32(1) / np.float32(10000) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    for layer in (0, 1, 2, 3):
        got = config.inv_freq(layer)
        assert got.dtype == np.float32
        chex.assert_trees_all_equal(got, plain if config.layer_types[layer] == SLIDING else yarn(dim, *borders))
    fastest = config.inv_freq(3)[0]
    slowest = config.inv_freq(3)[-1]
    assert fastest == 1.0
    # float64, from the closed form: the slowest pair is interpolated fully. 1e-6 is a few float32 roundings.
    chex.assert_trees_all_close(slowest, 160000.0 ** (-(dim - 2) / dim) / 16, rtol=1e-6)


def test_equal_yarn_borders_make_a_step():
    # Only a pair of angle 1 would turn 64 / 2 pi times in 64 tokens: both borders are 0, pair 0 alone keeps its angle.
    borders = {"beta_slow": 64 / (2 * math.pi), "beta_fast": 32}
    config = DSV4Config.from_hf(changed(RAW, "rope_scaling", RAW["rope_scaling"] | borders))
    chex.assert_trees_all_equal(config.inv_freq(1), yarn(8, 0, 0.001))
    chex.assert_trees_all_close(config.inv_freq(1)[1], 160000**-0.25 / 16, rtol=1e-6)
