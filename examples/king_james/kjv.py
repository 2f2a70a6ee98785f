"""The King James text as Debian ships it, in bytes, and how it is split.

Package bible-kjv-text has the file /usr/lib/bible.data, which holds lines such as "Ge1:1 In the beginning ...". The
lines are compressed as by Unix `compress`, in separate windows of 64 KiB. The text is in the public domain.
"""

import itertools
import re
from pathlib import Path

import numpy as np


BOS = 256
EOS = 257  # every excerpt begins with BOS, and every book ends with EOS
VOCAB = 258

VALIDATION = ("Judges", "Hebrews")  # books whose loss chooses the checkpoint
HELD_OUT = ("1 Samuel", "Ecclesiastes", "Jonah", "John")  # books that the final model is scored on

HOW_TO_GET_IT = """The text is in Debian's package bible-kjv-text (no root needed, any Debian or Ubuntu):
  apt-get download bible-kjv-text
  dpkg -x bible-kjv-text_*.deb kjv
and then --text kjv/usr/lib/bible.data. Any other file is taken as plain bytes, its last tenth held out."""

_MAGIC = b"EC02Compressed Data File"
_CLEAR = 256
_REFERENCE = re.compile(rb"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")
_BOOKS = (
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles "
    "2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes Song_of_Solomon Isaiah Jeremiah Lamentations "
    "Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew "
    "Mark Luke John Acts Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians "
    "1_Thessalonians 2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John "
    "3_John Jude Revelation"
).split()


def read_books(path: Path) -> dict[str, bytes]:
    """Reads the books of a text file by name: one verse a line, an empty line between chapters, no verse numbers.

    Args:
      path: the package's bible.data. Any other file is divided into two books, "start" (nine tenths of it) and "end".

    Raises:
      ValueError: the file is damaged, or it cannot be read. In the latter case the message says how to get it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}. {HOW_TO_GET_IT}") from None
    if not data.startswith(_MAGIC):
        cut = len(data) * 9 // 10
        return {"start": data[:cut], "end": data[cut:]}
    verses = [m.groups() for line in decompress(data).splitlines() if (m := _REFERENCE.fullmatch(line))]
    books: dict[str, bytes] = {}
    for number, (_, of_book) in enumerate(itertools.groupby(verses, lambda verse: verse[0])):
        chapters = itertools.groupby(of_book, lambda verse: verse[1])
        books[_BOOKS[number].replace("_", " ")] = b"\n".join(
            b"".join(text.strip() + b"\n" for *_, text in chapter) for _, chapter in chapters
        )
    if len(books) != len(_BOOKS):
        raise ValueError(f"{path} holds {len(books)} books; the whole Bible has {len(_BOOKS)}. Is it truncated?")
    return books


def split(books: dict[str, bytes]) -> dict[str, np.ndarray]:
    """Divides books among the parts "train", "validation" and "held_out".

    Books stay whole, so that no held-out page is next to a page of the training text. Of a plain file, the book "end"
    is both the validation text, which chooses the checkpoint, and the held-out text.

    Returns:
      {name of a part: [n] int32 ids of its books: bytes 0 to 255, and EOS after every book}.
    """
    if "end" in books:
        chosen = {"train": ("start",), "validation": ("end",), "held_out": ("end",)}
    else:
        apart = VALIDATION + HELD_OUT
        train = tuple(name for name in books if name not in apart)
        chosen = {"train": train, "validation": VALIDATION, "held_out": HELD_OUT}
    return {part: np.concatenate([tokens(books[name]) for name in names]) for part, names in chosen.items()}


def tokens(text: bytes) -> np.ndarray:
    """Returns the ids of a book, int32: its bytes, then EOS."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.int32), np.int32(EOS))


def decompress(data: bytes) -> bytes:
    """Decompresses bible.data: a header of big-endian words (at 0x54: window size, count, offsets) and LZW windows."""
    window, count, *offsets = (int.from_bytes(data[at : at + 4], "big") for at in range(0x54, len(data[:0x400]), 4))
    bounds = [*offsets[:count], len(data)]
    return b"".join(_lzw(data[begin:end], window) for begin, end in itertools.pairwise(bounds))


def _lzw(data: bytes, size: int) -> bytes:
    """Decompresses a window of `size` bytes. Codes have 9 bits, and more as the table fills; lowest bits come first."""
    # The loop ends when `out` has `size` bytes, because padding may follow the last code.
    table = [bytes([i]) for i in range(256)] + [b""]
    out = bytearray()
    previous = b""
    bits = 9
    bit = 0
    while len(out) < size and bit + bits <= 8 * len(data):
        code = int.from_bytes(data[bit >> 3 : (bit >> 3) + 4], "little") >> (bit & 7) & (1 << bits) - 1
        bit += bits
        if code == _CLEAR:
            break
        if code > len(table) or (code == len(table) and not previous):
            raise ValueError("bible.data is damaged: a code before its entry")
        entry = table[code] if code < len(table) else previous + previous[:1]
        if previous:
            table.append(previous + entry[:1])
        out += entry
        previous = entry
        bits = max(bits, len(table).bit_length())
    return bytes(out)
