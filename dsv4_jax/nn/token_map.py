"""Engram's compressed token ids, computed from a tokenizer."""

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from dsv4_jax.config import DSV4Config


_BLANK = "\ue000"  # stands for a text of one blank, which would be stripped
_UNDECODABLE = "\ufffd"  # the replacement character, to which broken UTF-8 is decoded


def compressed_token_ids(tokenizer: Tokenizer, config: DSV4Config) -> np.ndarray:
    """Computes the compressed id of each token id. Tokens share an id if they differ only in case, accents or blanks.

    More precisely, tokens share an id if their normalized texts are equal. A text of one blank is its own normalized
    text, and so is a text that normalization would make empty. If a token's bytes are not valid UTF-8, its name in the
    vocabulary takes the place of the normalized text. Compressed ids count from 0, in the order of each id's first
    token.

    Args:
      tokenizer: the tokenizer of the model's checkpoint.
      config: configuration of a model with Engram.

    Returns:
      [vocab] int32. Ids that the tokenizer lacks have the compressed id 0.

    Raises:
      ValueError: the tokenizer has more ids than the model, or another number of compressed ids than the configuration.
    """
    assert config.engram is not None
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > config.vocab_size:
        raise ValueError(f"the tokenizer has {size} ids, more than the model's vocab_size={config.vocab_size}")
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
    compressed_ids: dict[str | None, int] = {}
    ids = np.zeros(config.vocab_size, np.int32)
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _UNDECODABLE in text:
            identity = tokenizer.id_to_token(token)
        else:
            identity = normalizer.normalize_str(text) or text
        ids[token] = compressed_ids.setdefault(identity, len(compressed_ids))
    if len(compressed_ids) != config.engram.compressed_vocab_size:
        raise ValueError(
            f"the tokenizer gives {len(compressed_ids)} compressed ids, but the model's hashes are for "
            f"engram_compressed_vocab_size={config.engram.compressed_vocab_size}: it is not the model's tokenizer"
        )
    return ids
