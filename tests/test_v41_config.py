"""DSV4Config of DeepSeek-V4.1: both spellings, refusals, the release, toy models."""

import copy
import dataclasses
import json
import logging
import warnings

import pytest
from hypothesis import given, strategies as st

from dsv4_jax.cli.options import named_config
from dsv4_jax.config import DSparkConfig, DSV4Config, EngramConfig, LayerSpec, RopeScaling, shared_specs
from dsv4_jax.config.config_json import release_config
from tests.paths import DATA


FOLDERS = ("official_v41", "official_v41_fp8")
RAW = json.loads((DATA / "official_v41" / "config.json").read_text())
INFERENCE = json.loads((DATA / "official_v41" / "args.json").read_text())
TEXT = RAW["text_config"]
FLAT = {key: value for key, value in RAW.items() if key not in ("text_config", "vision_config")} | TEXT
FLAT["model_type"] = "deepseek_v41"
CONFIG = DSV4Config.from_hf(RAW)
# Values of the release, from its config.json. The inference code has the same under names of its own.
RELEASE = copy.deepcopy(RAW) | {"image_token_id": 129264}
RELEASE["text_config"] |= {
    "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "index_n_heads": 32, "index_head_dim": 128,
    "index_topk": 512, "max_position_embeddings": 1048576, "n_routed_experts": 384, "num_experts_per_tok": 6,
    "moe_intermediate_size": 2304, "rms_norm_eps": 1e-20, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
    "rope_scaling": TEXT["rope_scaling"] | {"original_max_position_embeddings": 65536},
}  # fmt: skip


def with_text(**fields):
    return RAW | {"text_config": TEXT | fields}


@pytest.mark.parametrize("folder", FOLDERS)
def test_both_spellings_give_equal_configs(folder):
    config = DSV4Config.from_hf(DATA / folder)
    inference = DSV4Config.from_hf(DATA / folder / "args.json")
    assert config.bos_token_id == 0 and config.eos_token_id == (1,) and config.image_token_id is not None
    # The inference code has no ids of tokens but Engram's.
    same_ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "image_token_id")}
    assert dataclasses.replace(inference, **same_ids) == config
    assert inference.eos_token_id == () and inference.bos_token_id is inference.image_token_id is None


def test_what_config_json_says():
    assert CONFIG.specs == shared_specs((0, 0, *(2,) * 4, *(1,) * 6), (2, 4, 6), (2, 4, 5, 6, 8, 9, 10), 6)
    assert CONFIG.mlp_layer_types == ("moe",) * 12
    assert (CONFIG.kv_format, CONFIG.norms_queries, CONFIG.delays_pre, CONFIG.weight_block) == ("v41", False, True, 32)
    assert (CONFIG.candidate_topk_blocks, CONFIG.candidate_block_size, CONFIG.image_token_id) == (3, 4, 199)
    assert CONFIG.engram == EngramConfig(
        layer_ids=(1, 4), num_embeddings=(434, 606), max_ngram_size=4, vocab_size=61, n_heads=2, head_dim=32,
        pad_token_id=2, compressed_vocab_size=82,
    )  # fmt: skip
    assert CONFIG.rope_scaling == RopeScaling(16.0, 32, 32.0, 1.0) and CONFIG.max_position_embeddings == 512
    assert CONFIG.drafts is None and len(CONFIG.layers) == 12
    assert DSV4Config.from_hf(FLAT) == CONFIG  # text_config may lie flat
    mixed = {key: value for key, value in FLAT.items() if key != "hidden_size"} | {"dim": 80}
    assert DSV4Config.from_hf(mixed) == CONFIG


def test_a_ratio_of_1_is_a_rate_and_0_is_none():
    rates = [spec.compress_rate for spec in CONFIG.specs]
    assert rates == [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert {spec.group for spec in CONFIG.specs[6:]} == {"full1"} and CONFIG.specs[0].group is None
    owners = [spec.layer for spec in CONFIG.specs if spec.owner]
    assert (
        owners == [2, 4, 6]
        and all(CONFIG.inv_freq(7) == CONFIG.inv_freq(2))
        and any(CONFIG.inv_freq(7) != CONFIG.inv_freq(0))
    )
    for ratio in (1, 2):  # a draft layer has a window only
        with pytest.raises(ValueError, match=rf"compress_ratios ends in \[0, {ratio}, 0\]"):
            DSV4Config.from_hf(with_text(compress_ratios=[*rates, 0, ratio, 0]), mtp=True)


def test_the_epsilon_is_the_files():
    assert CONFIG.rms_norm_eps == 1e-20 and CONFIG.hc_eps == 1e-6
    assert DSV4Config.from_hf(INFERENCE).rms_norm_eps == 1e-20


OPTIONAL = {
    *(key for key in TEXT if key.startswith("dspark_")), "attention_bias", "attention_dropout", "bos_token_id", "dtype",
    "eos_token_id", "hidden_act", "initializer_range", "model_type", "norm_topk_prob", "num_nextn_predict_layers",
    "pad_token_id", "tie_word_embeddings", "topk_method", "use_cache",
}  # fmt: skip
NO_MODEL = {
    "dtype", "expert_dtype", "gate_temp", "max_batch_size", "max_seq_len", "n_mtp_layers", "norm_topk_prob",
    "temperature",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(TEXT.keys() - OPTIONAL))
def test_every_key_is_required(key):
    text = {name: value for name, value in TEXT.items() if name != key}
    with pytest.raises(ValueError, match=rf"config.json lacks .*\b{key}\b"):
        DSV4Config.from_hf(RAW | {"text_config": text})
    if key != "rope_scaling":  # null: no YaRN
        with pytest.raises(ValueError, match=rf"config.json lacks .*\b{key}\b"):
            DSV4Config.from_hf(with_text(**{key: None}))


@pytest.mark.parametrize("key", sorted(INFERENCE.keys() - NO_MODEL))
def test_every_key_of_the_inference_code_is_required(key):
    with pytest.raises(ValueError, match=rf"config.json lacks .*\b{key}\b"):
        DSV4Config.from_hf({name: value for name, value in INFERENCE.items() if name != key})


def test_the_keys_of_section_1_2_are_among_the_required():
    required = TEXT.keys() - OPTIONAL
    assert len(required) == 43
    assert required >= {
        "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "candidate_topk_blocks",
        "candidate_block_size", "rope_theta", "compress_rope_theta", "rms_norm_eps", "index_n_heads", "compress_ratios",
        *(key for key in TEXT if key.startswith("engram_")),
    }  # fmt: skip


def test_without_yarn():
    assert DSV4Config.from_hf(with_text(rope_scaling=None)).rope_scaling is None


@pytest.mark.parametrize("outer", ["bos_token_id", "eos_token_id", "tie_word_embeddings"])
def test_top_level_and_text_config_must_agree(outer):
    other = {"bos_token_id": 5, "eos_token_id": 5, "tie_word_embeddings": True}[outer]
    with pytest.raises(ValueError, match=rf"on {outer}: {outer} = .*, text_config.{outer} = .?{other}"):
        DSV4Config.from_hf(with_text(**{outer: other}))
    assert DSV4Config.from_hf(with_text(**{outer: None})) == CONFIG
    assert DSV4Config.from_hf({key: value for key, value in RAW.items() if key != outer}) == CONFIG


def test_two_spellings_must_agree():
    with pytest.raises(ValueError, match="on hidden_size: hidden_size = 80, dim = 81"):
        DSV4Config.from_hf(FLAT | {"dim": 81})
    assert DSV4Config.from_hf(FLAT | {"dim": 80}) == CONFIG


SOURCES = {"kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 5, 6, 8, 9, 10]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_source_layer_ids": 2}, "kv_source_layer_ids=2 must be a list"),
        ({"kv_source_layer_ids": [2, 4, 12]}, r"kv_source_layer_ids\[2\]=12 must be at most 11"),
        ({"kv_source_layer_ids": [2, 4, -6]}, r"kv_source_layer_ids\[2\]=-6 must be at least 0"),
        ({"kv_source_layer_ids": [2, 4, 6.0]}, r"kv_source_layer_ids\[2\]=6.0 must be a whole number"),
        ({"kv_source_layer_ids": [4, 2, 6]}, r"kv_source_layer_ids=\[4, 2, 6\] must ascend"),
        ({"kv_source_layer_ids": [2, 2, 6]}, r"kv_source_layer_ids=\[2, 2, 6\] must ascend"),
        ({"kv_source_layer_ids": [1, 2, 6]}, r"kv_source_layer_ids\[0\]=1, but compress_ratios\[1\]=0"),
        ({"kv_source_layer_ids": [2, 3, 6]}, r"index_source_layer_ids=.* must have kv_source_layer_ids' \[3\], too"),
        ({"kv_source_layer_ids": [4, 6]}, r"compress_ratios\[2\]=2, but kv_source_layer_ids=\[4, 6\] begin later"),
        ({"kv_source_layer_ids": []}, r"compress_ratios\[2\]=2, but kv_source_layer_ids=\[\] begin later"),
        ({"kv_source_layer_ids": [2, 4]}, r"compress_ratios\[6\]=1, but the layer attends to entries of 2 tokens"),
        ({"index_source_layer_ids": [1, *SOURCES["index_source_layer_ids"]]}, r"index_source_layer_ids\[0\]=1, but"),
        ({"index_source_layer_ids": [2, 4, 5, 6, 10, 9]}, r"index_source_layer_ids=.* must ascend"),
        ({"index_source_layer_ids": [2, 5, 6]}, r"must have kv_source_layer_ids' \[4\], too"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id=7 must be one of index_source_layer_ids="),
        ({"candidate_source_layer_id": 4}, r"candidate_source_layer_id=4 must be a layer of rate 1, .*ratios\[4\]=2"),
        ({"candidate_source_layer_id": 12}, "candidate_source_layer_id=12 must be at most 11"),
        ({"candidate_source_layer_id": -2}, "candidate_source_layer_id=-2 must be at least -1"),
        ({"candidate_source_layer_id": [6]}, r"candidate_source_layer_id=\[6\] must be a whole number"),
        ({"candidate_topk_blocks": 2}, r"\(2 - 1\) \* 4 \+ 1 must be at least index_topk=8"),
        ({"index_topk": 10}, r"\(3 - 1\) \* 4 \+ 1 must be at least index_topk=10"),  # though 3 * 4 >= 10
        ({"candidate_block_size": 0}, "candidate_block_size=0 must be at least 1"),
        ({"candidate_topk_blocks": 3.0}, "candidate_topk_blocks=3.0 must be a whole number"),
        ({"compress_ratios": [0, 0, 2, 2]}, "compress_ratios has 4 entries, but num_hidden_layers=12"),
        ({"compress_ratios": [0, 0, 2, 1] + [2, 2] + [1] * 6}, r"compress_ratios\[3\]=1, but the layer attends to"),
        ({"engram_layer_ids": [4, 1]}, r"engram_layer_ids=\[4, 1\] must ascend"),
        ({"engram_layer_ids": [1, 12]}, r"engram_layer_ids\[1\]=12 must be at most 11"),
        ({"engram_layer_ids": 1}, "engram_layer_ids=1 must be a list"),
        ({"engram_num_embeddings": 434}, "engram_num_embeddings=434 must be a list"),
        ({"engram_num_embeddings": [434, 607]}, r"engram_num_embeddings=\[434, 607\] must be \[434, 606\]"),
        ({"engram_pad_token_id": 200}, "engram_pad_token_id=200 must be at most 199"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1 must be at least 2"),
        ({"engram_n_heads": None}, "lacks engram_n_heads"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 must be 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid' must be 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False must be True"),
        ({"model_type": "deepseek_v4"}, "text_config.model_type='deepseek_v4' must be 'deepseek_v41_text'"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(with_text(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v5"}, "model_type='deepseek_v5' must be 'deepseek_v4' or 'deepseek_v41'"),
        ({"model_type": ["deepseek_v41"]}, "model_type=.* must be 'deepseek_v4' or"),
        ({"text_config": [TEXT]}, "text_config=.* must be an object"),
        ({"image_token_id": 200}, "image_token_id=200 must be at most 199"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' must be an object"),
    ],
)
def test_contradictions_at_the_top_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(RAW | fields)


def test_weights_are_in_blocks_of_32():
    """Scales of 32 x 32 blocks that are read as those of 128 x 128 would change every weight without an error."""
    with pytest.raises(ValueError, match=r"weight_block_size=\[128, 128\] must be \[32, 32\] in DeepSeek-V4.1"):
        DSV4Config.from_hf(RAW | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    for absent in ({}, {"quant_method": "fp8"}, None):
        assert DSV4Config.from_hf(RAW | {"quantization_config": absent}) == CONFIG


def test_the_inference_code_names_what_is_missing_or_wrong_by_its_names():
    with pytest.raises(ValueError, match="original_seq_len=0 must be at least 1"):
        DSV4Config.from_hf(INFERENCE | {"original_seq_len": 0})
    with pytest.raises(ValueError, match="rope_factor=-1 must be"):
        DSV4Config.from_hf(INFERENCE | {"rope_factor": -1})
    with pytest.raises(ValueError, match="gate_temp=2.0 must be 1"):
        DSV4Config.from_hf(INFERENCE | {"gate_temp": 2.0})


def test_images_are_not_read_and_the_log_says_so(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "dsv4_jax"):
        warnings.simplefilter("error")
        DSV4Config.from_hf(RAW)
        DSV4Config.from_hf(INFERENCE | {"vision_dim": 1024, "vision_n_layers": 32})
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "vision_config",
        "vision_dim, vision_n_layers",
    ]
    with pytest.warns(UserWarning, match="not used here: gate_bias, layer_types"):
        DSV4Config.from_hf(with_text(gate_bias=1, layer_types=[]))


def test_without_candidates_or_engram():
    layers = shared_specs((0, 0, *(2,) * 4, *(1,) * 6), *SOURCES.values(), None)
    config = DSV4Config.from_hf(with_text(candidate_source_layer_id=-1, engram_layer_ids=[]))
    assert config == dataclasses.replace(CONFIG, specs=layers, engram=None)
    assert DSV4Config.from_hf(release_config(config)) == config


def test_a_configuration_that_takes_long_to_check_is_refused():
    text = dict(num_hidden_layers=600, compress_ratios=[0] * 600, kv_source_layer_ids=[], index_source_layer_ids=[])
    text |= dict(candidate_source_layer_id=-1, engram_layer_ids=list(range(600)), engram_vocab_size=16000000)
    with pytest.raises(
        ValueError, match="engram_layer_ids and engram_n_heads ask for 576000 primes, they must be at most 4096"
    ):
        DSV4Config.from_hf(with_text(**text, engram_n_heads=64, engram_max_ngram_size=16))


DSPARK = DSparkConfig(
    num_layers=3, block_size=5, noise_token_id=198, target_layer_ids=(9, 10, 11), markov_rank=16, n_routed_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip


def test_draft_layers_are_there_if_asked_for():
    config = DSV4Config.from_hf(RAW, mtp=True)
    assert config == dataclasses.replace(CONFIG, num_nextn_predict_layers=1, dspark=DSPARK)
    assert config.with_drafts(False) == CONFIG and len(config.layers) == 15
    assert config.layer_experts(11) == (6, 3) and config.layer_experts(12) == (4, 2)
    drafts = {key: value for key, value in TEXT.items() if key.startswith("dspark_")}
    drafts["dspark_n_activated_experts"] = drafts.pop("dspark_num_experts_per_tok")
    inference = INFERENCE | drafts | {"n_mtp_layers": 3, "compress_ratios": TEXT["compress_ratios"]}
    assert DSV4Config.from_hf(inference, mtp=True).dspark == DSPARK
    for experts in ("dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        text = {key: value for key, value in TEXT.items() if key != experts}
        model = DSV4Config.from_hf(RAW | {"text_config": text}, mtp=True)
        expected = {"dspark_n_routed_experts": (6, 2), "dspark_num_experts_per_tok": (4, 3)}
        assert model.layer_experts(12) == expected[experts]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dspark_n_routed_experts": 0}, "dspark_n_routed_experts=0 must be at least 1"),
        ({"dspark_n_routed_experts": "4"}, "n_routed_experts"),
        ({"dspark_num_experts_per_tok": 0}, "dspark_num_experts_per_tok=0 must be at least 1"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok=5 exceeds dspark_n_routed_experts=4"),
        (
            {"dspark_n_routed_experts": None, "dspark_num_experts_per_tok": 7},
            "_tok=7 exceeds dspark_n_routed_experts=6",
        ),
        (
            {"dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": None},
            "_tok=3 exceeds dspark_n_routed_experts=2",
        ),
        ({"dspark_target_layer_ids": [9, 10, 12]}, r"dspark_target_layer_ids\[2\]=12 must be at most 11"),
        ({"dspark_markov_rank": None}, "lacks dspark_markov_rank"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2 must be 3, the number of DSpark's layers, or 1"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0 or absent"),
    ],
)
def test_impossible_draft_layers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DSV4Config.from_hf(with_text(**fields), mtp=True)
    assert DSV4Config.from_hf(with_text(**fields)) == CONFIG


def test_there_is_no_block_of_multi_token_prediction():
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1 needs dspark if delays_pre=True"):
        CONFIG.with_drafts(True)
    text = {key: value for key, value in TEXT.items() if not key.startswith("dspark_")}
    with pytest.raises(ValueError, match="needs dspark if delays_pre=True"):
        DSV4Config.from_hf(RAW | {"text_config": text | {"num_nextn_predict_layers": 1}}, mtp=True)


def test_flash_equals_the_released_config():
    for mtp in (False, True):
        assert DSV4Config.from_hf(RELEASE, mtp=mtp) == DSV4Config.v41_flash(mtp=mtp)
        assert named_config("v41_flash", "--config", mtp=mtp) == DSV4Config.v41_flash(mtp=mtp)
    assert DSV4Config.v41_flash(mtp=True).with_drafts(False) == DSV4Config.v41_flash()
    assert DSV4Config.v41_flash(mtp=True).layer_experts(40) == (128, 3)


def test_what_flash_stores_and_selects():
    config = DSV4Config.v41_flash()
    assert [spec.layer for spec in config.specs if spec.owner] == [2, 8, 14, 20]
    assert [spec.layer for spec in config.specs if spec.selects] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [spec.layer for spec in config.specs if spec.candidates == 20] == [20, 24, 28, 32, 36]
    assert [config.specs[layer].selection for layer in (3, 13, 19, 21, 27, 39)] == [2, 8, 14, 20, 24, 36]
    assert [(config.specs[layer].group, config.specs[layer].index) for layer in (7, 13, 19, 39)] == [
        ("full2", 0),
        ("full2", 1),
        ("full2", 2),
        ("full1", 0),
    ]


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("raw", [RAW, RELEASE], ids=["toy", "release"])
def test_what_is_written_reads_to_the_same_config(raw, mtp):
    config = DSV4Config.from_hf(raw, mtp=mtp)
    written = json.loads(json.dumps(release_config(config)))
    assert DSV4Config.from_hf(written, mtp=mtp) == config
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no field is unknown
        assert DSV4Config.from_hf(written) == config.with_drafts(False)
    # Its layout is the release's.
    assert written["architectures"] == raw["architectures"] and written["model_type"] == raw["model_type"]
    assert written.keys() <= raw.keys() and written["text_config"].keys() <= raw["text_config"].keys()
    if mtp:
        ignored = {"dtype", "pad_token_id", "quantization_config", "vision_config"}
        assert written.keys() == raw.keys() - ignored
        for key, value in written["text_config"].items():
            assert raw["text_config"][key] == value


TOY = dict(kv_format="v41", norms_queries=False, delays_pre=True, weight_block=32)
TOY_LAYERS = shared_specs((0, 2, 2, 1, 1), (1, 3), (1, 3, 4), 3)


def test_a_toy_model():
    config = DSV4Config.small(
        TOY_LAYERS, **TOY, candidate_topk_blocks=5, candidate_block_size=4, rms_norm_eps=1e-20,
        engram=EngramConfig(
            layer_ids=(1, 3), num_embeddings=(434, 606), max_ngram_size=4, vocab_size=61, n_heads=2, head_dim=32,
            pad_token_id=2, compressed_vocab_size=82,
        ),
    )  # fmt: skip
    assert DSV4Config.from_hf(release_config(config)) == config
    assert config.has_engram(3) and not config.has_engram(2)
    assert repr(config).startswith("DSV4Config(1 window only, 2 full2 of 2 tokens, 2 full1 of 1 tokens; ")
    assert config.first_layers(5) == config
    shorter = config.first_layers(3)
    assert shorter.engram is not None and shorter.engram.layer_ids == (1,) and shorter.engram.num_embeddings == (434,)
    assert config.first_layers(1).engram is None
    drafting = config.with_dspark(8, n_routed_experts=4, num_experts_per_tok=1)
    assert DSV4Config.from_hf(release_config(drafting), mtp=True) == drafting


def replaced(number, **fields):
    layers = list(CONFIG.specs)
    layers[number] = dataclasses.replace(layers[number], **fields)
    return {"specs": tuple(layers)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norms_queries": True}, "kv_format='v41', norms_queries=True, delays_pre=True, weight_block=32 in one model"),
        ({"kv_format": "v4"}, "kv_format='v4', norms_queries=False, delays_pre=True, weight_block=32 in one model"),
        ({"weight_block": 128}, "kv_format='v41', norms_queries=False, delays_pre=True, weight_block=128 in one model"),
        ({"mlp_layer_types": ("hash_moe",) + ("moe",) * 11}, "mlp_layer_types=.*hash_moe.* of type deepseek_v41"),
        (replaced(3, index_topk=None, selection=None), "layer 3: LayerSpec"),
        (replaced(11, selection=9), "layer 11: LayerSpec"),
        (replaced(9, candidates=None), "layer 9: LayerSpec"),
        (replaced(5, index=0), "layer 5: LayerSpec"),
        (replaced(5, window=5), "layer 5: LayerSpec"),
        (replaced(0, **vars(LayerSpec.hca())), r"the layers: index_source_layer_ids=.* must have .* \[0\], too"),
    ],
)
def test_what_the_release_cannot_express(fields, message):
    with pytest.raises(ValueError, match=f"the release's config.json cannot express {message}"):
        release_config(dataclasses.replace(CONFIG, **fields))


@pytest.mark.parametrize(
    "fields",
    [{"engram": CONFIG.engram}, {"candidate_topk_blocks": 1, "candidate_block_size": 1}],
    ids=["engram", "sizes"],
)
def test_what_v4_cannot_express(fields):
    config = DSV4Config.small([LayerSpec(), LayerSpec.csa()] * 3, **fields)
    with pytest.raises(ValueError, match="cannot express (engram|candidate_topk_blocks)=.* of type deepseek_v4"):
        release_config(config)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*TEXT, *INFERENCE, "text_config", "vision_config", "quantization_config"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["weight_block_size"]), inner),
            max_leaves=6,
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_any_junk_in_any_field_is_a_value_error_or_a_config(junk, mtp):
    for raw in (FLAT | junk, with_text(**junk), RAW | junk, INFERENCE | junk):
        try:
            with warnings.catch_warnings(action="ignore"):
                assert isinstance(DSV4Config.from_hf(raw, mtp=mtp), DSV4Config)
        except ValueError:
            pass


def test_one_end_of_text_may_be_a_list():
    assert DSV4Config.from_hf(with_text(eos_token_id=1) | {"eos_token_id": [1]}).eos_token_id == (1,)


def test_a_null_end_of_text_is_no_end():
    assert DSV4Config.from_hf(FLAT | {"eos_token_id": None}).eos_token_id == ()


def test_the_inference_code_of_v4_is_no_v41():
    config = {name: value for name, value in INFERENCE.items() if "source_layer" not in name}
    with pytest.raises(ValueError, match="model_type=None must be 'deepseek_v4' or 'deepseek_v41'"):
        DSV4Config.from_hf(config)
