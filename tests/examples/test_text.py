"""The package's compressed text, and what is hidden in texts."""

import chex
import kjv
import numpy as np
import pytest
from needles import DIGITS, LETTERS, PAIR, plant, test_row as make_row, training_row


def compress(window):
    """LZW as `compress` writes it, for `kjv.decompress` to read."""
    codes = {bytes([i]): i for i in range(256)}
    stream = 0
    at = 0
    bits = 9
    count = 257
    now = b""
    for i in range(len(window) + 1):
        ahead = now + window[i : i + 1]
        if i < len(window) and ahead in codes:
            now = ahead
            continue
        stream |= codes[now] << at
        at += bits
        codes[ahead] = count
        count += 1
        # The reader's table lags by an entry.
        bits = max(bits, (count - 1).bit_length())
        now = window[i : i + 1]
    return stream.to_bytes((at + 7) // 8, "little")


def packed(text, size):
    parts = [compress(text[i : i + size]) for i in range(0, len(text), size)]
    parts[:-1] = [part + b"\xa5\x5a" for part in parts[:-1]]  # checkpoints' padding
    header = 0x5C + 4 * len(parts)
    offsets = np.cumsum([header, *map(len, parts[:-1])])
    words = [size, len(parts), *offsets.tolist()]
    magic = b"EC02Compressed Data File".ljust(0x54, b"\0")
    return magic + b"".join(word.to_bytes(4, "big") for word in words) + b"".join(parts)


def test_reads_the_packages_compression(tmp_path):
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(1, 9)).tolist()) for _ in range(200)]
    text = b" ".join(words[i] for i in rng.integers(0, 200, 3000))
    assert kjv.decompress(packed(text, 4096)) == text


def test_books_chapters_and_split(tmp_path):
    books = [f"B{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(66)]
    lines = [f"{book}{c}:{v} {book} says {c} {v}." for book in books for c in (1, 2) for v in (1, 2)]
    file = tmp_path / "bible.data"
    file.write_bytes(packed("\n".join(["A title.", *lines, ""]).encode(), 1000))
    texts = kjv.read_books(file)
    assert list(texts)[:2] == ["Genesis", "Exodus"] and list(texts)[-1] == "Revelation"
    assert texts["Exodus"] == b"Bab says 1 1.\nBab says 1 2.\n\nBab says 2 1.\nBab says 2 2.\n"
    parts = kjv.split(texts)
    whole = {part: bytes(ids[ids < 256].astype(np.uint8).tolist()) for part, ids in parts.items()}
    assert whole["held_out"] == b"".join(texts[name] for name in kjv.HELD_OUT)
    assert sum(map(len, whole.values())) == sum(map(len, texts.values()))
    assert [np.sum(ids == kjv.EOS) for ids in parts.values()] == [60, 2, 4]

    file.write_bytes(packed("\n".join(lines[:40]).encode(), 1000))
    with pytest.raises(ValueError, match="holds 10 books; the whole Bible has 66"):
        kjv.read_books(file)


def verses(n):
    return np.frombuffer(b"And it came to pass that he went.\n" * n, np.uint8).astype(np.int32)


def asked_and_told(planted):
    """The pair at each question, and the pair at the distance that is said."""
    begins = planted.answers - LETTERS
    text = bytes(planted.ids[1:].astype(np.uint8).tolist())
    return [[text[at - 1 : at - 2 + PAIR] for at in places] for places in (begins, begins - planted.distances)]


def test_what_is_asked_was_told_at_that_distance():
    planted = plant(np.random.default_rng(1), verses(60), 1500, [[10, 300, 1000], [400, 412], [700, 1495]])
    assert planted.ids[0] == kjv.BOS and len(planted.ids) == 1500
    asked, told = asked_and_told(planted)
    assert asked == told and len(set(asked)) == 2, "the third pair's question does not fit"
    assert all(pair[:LETTERS].isupper() and pair[LETTERS:].isdigit() for pair in asked)
    chex.assert_trees_all_close(np.array(planted.distances), np.array([290, 12, 700]), rtol=1e-7, atol=8)
    ids = planted.ids[1:].astype(np.uint8).tolist()
    for pair in {*asked, *told}:
        ids = [*bytes(ids).replace(pair + b" ", b"")]
    chex.assert_trees_all_equal(np.array(ids[:600]), np.array(verses(60)[:600]))


def test_training_rows_ask_for_what_they_told():
    rows = [training_row(np.random.default_rng(seed), verses(100), 1025, 12, 16, 10.0) for seed in range(20)]
    pairs = []
    for ids, weights in rows:
        assert ids.shape == weights.shape == (1025,)
        digits = (ids >= ord("0")) & (ids <= ord("9"))
        chex.assert_trees_all_equal(weights == 1, ~digits)
        asked, told = (ids[weights == weight] for weight in (10, 0))
        told = told[: len(told) // DIGITS * DIGITS]  # a value at the row's very end may be cut
        assert len(asked) >= 6 * DIGITS
        told = {tuple(value) for value in told.reshape(-1, DIGITS)}
        assert {tuple(value) for value in asked.reshape(-1, DIGITS)} <= told
        pairs.append(len(told))
    assert min(pairs) == 1 and max(pairs) >= 10, "rows with few pairs and with many"


def test_needles_lie_where_they_should():
    distances = (500, 2000, 8000)
    planted = make_row(np.random.default_rng(1), verses(400), distances, 3)
    assert len(planted.answers) == 9 and planted.ids[0] == kjv.BOS
    asked, told = asked_and_told(planted)
    assert asked == told and len(set(asked)) == 9
    assert planted.answers.min() - LETTERS > max(distances), "a question before the last pair"
    chex.assert_trees_all_close(np.sort(planted.distances), np.repeat(distances, 3), rtol=1e-7, atol=4 * PAIR)
