"""Text to token ids and back, by the tokenizer.json that lies beside the weights."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


TOKENIZER_NAME = "tokenizer.json"
_UNFINISHED = "\ufffd"  # what decoding puts in the place of bytes that are no whole character


def read_tokenizer(path: str | Path) -> Tokenizer | None:
    """A checkpoint's tokenizer, of whatever kind its tokenizer.json says.

    Args:
        path: the checkpoint: a folder, or a file with tokenizer.json beside it.

    Returns:
        The tokenizer: `encode(text).ids` and `decode(ids)`; None where there is no tokenizer.json.

    Raises:
        ValueError: tokenizer.json is broken.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / TOKENIZER_NAME
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"cannot read {file}: {error}") from None


def write_byte_tokenizer(path: str | Path, specials: dict[str, int], *, begin: str | None = None) -> None:
    """Writes a tokenizer.json by which a token is a byte: ids 0 to 255 are the bytes of the text in UTF-8.

    Args:
        path: the file to write, named tokenizer.json if it is to be found beside a checkpoint's weights.
        specials: ids, 256 or more, of tokens that stand for no byte, such as {"<bos>": 256, "<eos>": 257}. Written
            out in a text they are read as these tokens; decoding leaves them out unless it is asked not to.
        begin: the one of them that encoding puts before every text; None = none.

    Raises:
        ValueError: a special token is empty, shares its id with another or has that of a byte; `begin` is none of them.
    """
    if "" in specials or len(set(specials.values())) < len(specials) or min(specials.values(), default=256) < 256:
        raise ValueError(f"{specials=} must be named, and have ids of their own from 256 on: the others are the bytes'")
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    if clashes := vocabulary.keys() & specials.keys():
        raise ValueError(f"{specials=}: {', '.join(sorted(clashes))} would be taken for a byte; use longer names")
    if begin is not None and begin not in specials:
        raise ValueError(f"{begin=} must be one of {specials=}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", None, [(begin, specials[begin])])
    tokenizer.save(str(path))


def _byte_characters() -> list[str]:
    """The characters that byte-level vocabularies write for bytes 0 to 255 (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the others are, in order, the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


class TokenBytes:
    """The bytes that single tokens stand for: parts of characters, too."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # The names of a byte-level vocabulary's own tokens are their bytes.
        self._bytes = {character: byte for byte, character in enumerate(_byte_characters())}
        self._named_otherwise = tokenizer.get_added_tokens_decoder().keys()
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __getitem__(self, token: int) -> bytes | None:
        """The bytes of a token, those of its name if it is special; None if the tokenizer does not tell."""
        name = self._tokenizer.id_to_token(token) or ""
        is_byte_level = self._is_byte_level and token not in self._named_otherwise
        if is_byte_level and self._bytes.keys() >= set(name):
            return bytes(self._bytes[character] for character in name)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if _UNFINISHED in text else text.encode()


class TextStream:
    """Token ids, one by one, to text; characters that are not complete yet are held back.

    Some tokenizers write a token differently at the start of a text. So each piece is what the tokens since the piece
    before last add to that piece, never a token decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # tokens of `_ids` whose text was given out

    def add(self, token: int) -> str:
        """The text that can be shown now that this token is there; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._rest()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def finish(self) -> str:
        """What was held back: a replacement character for bytes that never became one."""
        return self._rest()

    def _rest(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._tokenizer.decode(self._ids[: self._known])) :]
