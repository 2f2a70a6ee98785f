"""A vocabulary for the bigram model, with the characters of JSON and pieces of several characters."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsv4_jax.engine.grammar import Vocabulary
from tests.host.managers import CONFIG


PIECES = [
    *string.printable.replace("\r\x0b\x0c", ""),
    '{"',
    '":',
    '",',
    '"}',
    "},",
    "[[",
    "true",
    "false",
    "null",
    "12",
]
BYTES = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}  # as byte-level tokenizers write them
END = len(PIECES)


def make_tokenizer():
    names = ["".join(BYTES.get(c, c) for c in piece) for piece in PIECES]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)} | {"<end>": END}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def text(tokens):
    return "".join(PIECES[token] for token in tokens if token != END)


VOCABULARY = Vocabulary(make_tokenizer(), CONFIG.vocab_size, [END])
