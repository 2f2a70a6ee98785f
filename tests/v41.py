"""A small model with all that DeepSeek-V4.1 has and V4 has not. Selections and candidates leave entries out."""

import dataclasses

from dsv4_jax.config import DSV4Config, EngramConfig, shared_specs


def v41_config(*, drafts: bool = False) -> DSV4Config:
    """The configuration. With draft layers, it also has DSpark's, whose experts have numbers of their own.

    The layers: a window only; one that stores entries of 2 tokens; one that stores entries of 1 token and makes
    candidates; one that selects among these; one that reuses this selection. Engram is before the second layer.
    """
    primes = 13 + 17 + 19 + 23
    config = DSV4Config.small(
        shared_specs((0, 2, 1, 1, 1), (1, 2), (1, 2, 3), 2),
        kv_format="v41", norms_queries=False, delays_pre=True, candidate_topk_blocks=3, candidate_block_size=4,
        vocab_size=160, num_attention_heads=8, o_groups=8, head_dim=64, qk_rope_head_dim=16, index_head_dim=32,
        index_topk=8, sliding_window=8, rms_norm_eps=1e-20, image_token_id=159, weight_block=32,
        engram=EngramConfig(
            layer_ids=(1,), num_embeddings=(primes,), max_ngram_size=3, vocab_size=13, n_heads=2, head_dim=32,
            pad_token_id=2, compressed_vocab_size=50,
        ),
    )  # fmt: skip
    if not drafts:
        return config
    config = config.with_dspark(16, n_routed_experts=4, num_experts_per_tok=1)
    assert config.dspark is not None
    return dataclasses.replace(config, dspark=dataclasses.replace(config.dspark, num_layers=2, block_size=3))
