"""tokenizer.json: byte-level ones, any other that is there, and text that comes token by token."""

import json

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4_jax.checkpoint import TextStream, TokenBytes, read_tokenizer
from tests.byte_tokenizer import write_byte_tokenizer
from tests.paths import PACKAGED


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder / "tokenizer.json", {"<bos>": 256, "<eos>": 259})
    (folder / "model.safetensors").touch()
    return read_tokenizer(folder / "model.safetensors")


@given(text=st.text())
def test_a_token_is_a_byte(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_specials_stand_for_no_byte(tokenizer):
    ids = tokenizer.encode("<bos>In the\n<eos>").ids
    assert ids == [256, *b"In the\n", 259]
    assert tokenizer.decode(ids) == "In the\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>In the\n<eos>"


def test_the_packaged_models_texts_begin_with_a_token():
    tokenizer = read_tokenizer(PACKAGED)
    assert tokenizer.encode("In").ids == [256, *b"In"]
    assert tokenizer.encode("In", add_special_tokens=False).ids == [*b"In"]
    assert tokenizer.decode([256, *b"In"]) == "In"


def test_checkpoints_without_a_tokenizer_and_with_a_broken_one(tmp_path):
    assert read_tokenizer(tmp_path) is None
    for content in ("{", json.dumps({"model": 3})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
            read_tokenizer(tmp_path)


def test_a_pattern_that_does_not_compile_is_refused(tmp_path):
    """The library panics, in an exception that `except Exception` lets pass."""
    write_byte_tokenizer(tmp_path / "tokenizer.json", {})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    split = dict(type="Split", pattern=dict(Regex="(" * 3), behavior="Isolated", invert=False)
    for place in ({"pre_tokenizer": split}, {"normalizer": dict(type="Replace", pattern=dict(Regex="["), content="")}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | place))
        with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
            read_tokenizer(tmp_path)


@given(st.text())
def test_streamed_text_is_the_text_and_never_has_half_a_character(tokenizer, text):
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in text.encode()]
    shown = "".join(pieces)
    assert shown + stream.finish() == text
    if not text.endswith("\ufffd"):
        assert shown == text
    assert "\ufffd" in text or "\ufffd" not in shown


@given(st.lists(st.integers(0, 259), max_size=20))
def test_streaming_survives_bytes_that_are_no_text(tokenizer, ids):
    stream = TextStream(tokenizer)
    shown = "".join(stream.add(token) for token in ids) + stream.finish()
    assert shown == tokenizer.decode(ids) == bytes(i for i in ids if i < 256).decode(errors="replace")


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_other_tokenizers_stream_too(kind):
    """As DeepSeek's: merged bytes, tokens that end within a character. As SentencePiece's: no space at the start."""
    text = "In the beginning 你好，世界 😀😀 the heaven and the earth."
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    other = Tokenizer(models.BPE())
    if kind == "bytes":
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        other.decoder = decoders.ByteLevel()
    else:
        other.pre_tokenizer = pre_tokenizers.Metaspace()
        other.decoder = decoders.Metaspace()
    other.train_from_iterator([text] * 3, trainer)
    ids = other.encode(text).ids
    assert len(ids) < len(text.encode())
    stream = TextStream(other)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == other.decode(ids) == text
    assert "\ufffd" not in "".join(pieces)

    parts = [TokenBytes(other)[token] for token in ids]
    if kind == "bytes":
        assert b"".join(parts) == text.encode() and any(len(part) > 1 for part in parts)
    else:
        assert parts == [other.decode([token]).encode() for token in ids]


def test_tokens_have_bytes_and_specials_those_of_their_names(tokenizer):
    found = TokenBytes(tokenizer)
    assert [found[token] for token in range(256)] == [bytes([byte]) for byte in range(256)]
    assert (found[256], found[259], found[258]) == (b"<bos>", b"<eos>", b"")  # the last is no token


def test_the_packaged_tokenizer_fits_the_vocabulary():
    vocabulary = read_tokenizer(PACKAGED).get_vocab().values()
    assert sorted(vocabulary) == list(range(json.loads((PACKAGED / "config.json").read_text())["vocab_size"]))
