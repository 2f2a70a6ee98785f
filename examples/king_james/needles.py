"""Hides key-value pairs in a text and asks for them later: "And the earth QXK4821 was without form"."""

import dataclasses

import kjv
import numpy as np


LETTERS = 3
DIGITS = 4
# A key, its value and a space. The value follows its key at once, so that the last bytes determine it.
PAIR = LETTERS + DIGITS + 1
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A row of text with key-value pairs between its words. A question is a later mention of a key and its value.

    Attributes:
      ids: [n] int32, BOS first.
      answers: [questions] int64, position in `ids` of the first digit of each value that is asked for.
      distances: [questions] int64, number of bytes from the value's preceding mention to the question.
    """

    ids: np.ndarray
    answers: np.ndarray
    distances: np.ndarray


def plant(rng: np.random.Generator, text: np.ndarray, length: int, mentions: list[list[int]]) -> Planted:
    """Puts pairs between the words of a text. A pair's first mention tells the value, and later mentions ask for it.

    Args:
      rng: generator of keys and values.
      text: int32 ids, at least `length` of them.
      length: length of the row; questions that do not fit are left out.
      mentions: for each pair the positions at which it is mentioned, ascending. The pair is put before the next word
        from there on, because words are not divided.
    """
    keys = rng.choice(len(_ALPHABET) ** LETTERS, len(mentions), replace=False)
    letters = _ALPHABET[np.stack(np.unravel_index(keys, (len(_ALPHABET),) * LETTERS), axis=1)]
    values = rng.integers(ord("0"), ord("9") + 1, (len(mentions), DIGITS))
    words = np.append(np.flatnonzero(text == ord(" ")) + 1, len(text))
    row = [kjv.BOS]
    copied = 0
    answers = []
    distances = []
    previous: dict[int, int] = {}
    for place, pair in sorted((place, pair) for pair, places in enumerate(mentions) for place in places):
        next_word = words[np.searchsorted(words, copied + max(place - len(row), 0))]
        row += text[copied:next_word].tolist()
        copied = next_word
        value_place = len(row) + LETTERS
        row += [*letters[pair].tolist(), *values[pair].tolist(), ord(" ")]
        if pair in previous and value_place + DIGITS <= length:
            answers.append(value_place)
            distances.append(value_place - previous[pair])
        previous[pair] = value_place
    ids = np.array(row + text[copied:].tolist(), np.int32)[:length]
    return Planted(ids, np.array(answers, np.int64), np.array(distances, np.int64))


def training_row(
    rng: np.random.Generator, text: np.ndarray, length: int, questions: int, nearest: int, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Makes a row with up to `questions` questions, at log-uniform distances from `nearest` bytes to the row's length.

    The number of pairs is log-uniform, too: few pairs teach copying, many teach retrieval.

    Returns:
      (ids, weights), [length] each. `weights` are float32 weights in the loss: `weight` for digits that are asked for,
      0 for digits that are told, since they cannot be predicted, and 1 for everything else.
    """
    pairs = round(questions ** rng.uniform())
    mentions = []
    for _ in range(pairs):
        gaps = []
        room = 0.9 * length
        for gap in np.exp(rng.uniform(np.log(nearest), np.log(room), -(-questions // pairs))):
            if gap <= room:
                gaps.append(gap)
                room -= gap
        start = rng.uniform(1, length - PAIR - sum(gaps))
        mentions.append((start + np.cumsum([0, *gaps])).astype(int).tolist())
    planted = plant(rng, text, length, mentions)
    weights = np.ones(length, np.float32)
    weights[_digits(planted.ids)] = 0
    weights[planted.answers[:, None] + np.arange(DIGITS)[None, :]] = weight
    return planted.ids, weights


def test_row(rng: np.random.Generator, text: np.ndarray, distances: tuple[int, ...], pairs: int) -> Planted:
    """Makes a row that ends with questions: for each of the distances, `pairs` questions, all in random order."""
    asked = rng.permutation(np.repeat(distances, pairs))
    places = max(distances) + 2 * PAIR + 4 * PAIR * np.arange(len(asked))
    planted = plant(rng, text, int(places[-1]) + 8 * PAIR, np.stack([places - asked, places], axis=1).tolist())
    assert len(planted.answers) == len(asked), "a word longer than the room for it"
    return planted


def _digits(ids):
    return (ids >= ord("0")) & (ids <= ord("9"))
