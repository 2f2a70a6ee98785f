"""Tokenizers of checkpoints, and incremental decoding."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers

from dsv4_jax.common.downloads import check_not_lfs_pointer


TOKENIZER_NAME = "tokenizer.json"
_UNFINISHED = "\ufffd"  # the replacement character, to which incomplete UTF-8 is decoded


def read_tokenizer(path: str | Path) -> Tokenizer | None:
    """Reads the tokenizer.json of a checkpoint. Returns None if the checkpoint has no such file.

    Args:
      path: folder of the checkpoint, or a file in this folder.

    Raises:
      ValueError: tokenizer.json is a Git LFS pointer or no valid tokenizer.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / TOKENIZER_NAME
    if not file.exists():
        return None
    content = file.read_bytes()
    check_not_lfs_pointer(file, content)
    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # The library raises plain Exception. For a pattern that it cannot compile, it raises PanicException, which is
        # not a subclass of Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"cannot read {file}: {error}") from None
        raise


def byte_characters() -> list[str]:
    """Returns the characters that stand for the bytes 0 to 255 in byte-level vocabularies (GPT-2's `bytes_to_unicode`).

    A byte that is the code of a printable Latin-1 character is represented by this character. The other bytes, in
    order, are represented by the characters from U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stand_ins = iter(character for character in alphabet if ord(character) > 255)
    return [chr(byte) if chr(byte) in alphabet else next(stand_ins) for byte in range(256)]


class TokenBytes:
    """A mapping from token ids to the tokens' bytes, which may be parts of UTF-8 characters."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # In a byte-level vocabulary, each character of a regular token's name stands for a byte of the token.
        self._bytes = {character: byte for byte, character in enumerate(byte_characters())}
        self._named_otherwise = tokenizer.get_added_tokens_decoder().keys()
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __getitem__(self, token: int) -> bytes | None:
        """Returns the bytes of a token, or of the name of a special token; None if they cannot be determined."""
        name = self._tokenizer.id_to_token(token) or ""
        is_byte_level = self._is_byte_level and token not in self._named_otherwise
        if is_byte_level and self._bytes.keys() >= set(name):
            return bytes(self._bytes[character] for character in name)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if _UNFINISHED in text else text.encode()


class TextStream:
    """Decodes token ids one by one. The text of an incomplete character is held back until it is complete.

    Some tokenizers decode a token differently at the start of a text. So a token is decoded together with the tokens
    of the most recent text that `add` returned.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids = []
        self._known = 0  # number of leading `_ids` whose text was returned

    def add(self, token: int) -> str:
        """Appends a token. Returns the text that it completes, which is empty while a character is incomplete."""
        self._ids.append(token)
        text = self.finish()
        if not text or text.endswith(_UNFINISHED):
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return text

    def finish(self) -> str:
        """Returns the text that was held back, with replacement characters for incomplete ones."""
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._known])) :]
