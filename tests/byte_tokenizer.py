"""A tokenizer whose ids 0 to 255 are the bytes of the text in UTF-8, as the packaged model's."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dsv4_jax.checkpoint.tokenizer import byte_characters


def write_byte_tokenizer(path, specials):
    """Writes a tokenizer.json; `specials` are the ids of special tokens by name, from 256 on."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.save(str(path))
