"""Key-value pairs hidden in a text, and questions about them: "The portion of Zadobi was 4821."."""

import dataclasses

import kjv
import numpy as np


DIGITS = 4
_CONSONANTS, _VOWELS = "bdghjklmnprstz", "aeiou"


@dataclasses.dataclass(frozen=True)
class Planted:
    """A row with needles.

    Attributes:
      ids: [n] int32, BOS first.
      answers: [questions] int64, where each asked value begins in `ids`.
      distances: [questions] int64, bytes from where a value is told to where it is asked for.
    """

    ids: np.ndarray
    answers: np.ndarray
    distances: np.ndarray


def plant(rng: np.random.Generator, text: np.ndarray, length: int, asked: list[tuple[int, int]]) -> Planted:
    """Puts pairs into a text, each told once and asked for once.

    Args:
      rng: draws names and values.
      text: int32 ids of whole verses, at least `length` of them.
      length: of the row; questions that do not fit are left out.
      asked: (place of the question, bytes back to the pair) of each, both roughly: sentences stand between verses.
    """
    events = []
    for number, (name, (place, distance)) in enumerate(zip(_names(rng, len(asked)), asked, strict=True)):
        value = "".join(str(digit) for digit in rng.integers(0, 10, DIGITS))
        sentence = f"The portion of {name} was {value}.\n".encode()
        events += [(place - distance, 0, number, sentence), (place, 1, number, sentence)]
    verses = np.split(text, np.flatnonzero(text == ord("\n")) + 1)
    row, begins = [kjv.BOS], np.zeros((2, len(asked)), np.int64)
    for place, question, number, sentence in sorted(events):
        while len(row) < place:
            row += verses.pop(0).tolist()
        row += sentence
        begins[question, number] = len(row) - len(".\n") - DIGITS
    ids = np.array(row + np.concatenate(verses).tolist(), np.int32)[:length]
    told, answers = begins[:, begins[1] + DIGITS <= length]
    return Planted(ids, answers, answers - told)


def training_row(
    rng: np.random.Generator, text: np.ndarray, length: int, pairs: int, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """A row with pairs at distances of all magnitudes up to its length, and each id's weight in the loss.

    Returns:
      (ids [length] int32, weights [length] float32: `weight` for digits asked for, 0 for digits told, which nobody can
      know, 1 for the rest).
    """
    distances = np.exp(rng.uniform(np.log(100), np.log(0.9 * length), pairs)).astype(int)
    planted = plant(rng, text, length, [(int(rng.integers(d + 40, length - 40)), int(d)) for d in distances])
    weights = np.ones(length, np.float32)
    places = planted.answers[:, None] + np.arange(DIGITS)[None, :]
    weights[places] = weight
    weights[places - planted.distances[:, None]] = 0
    return planted.ids, weights


def test_row(rng: np.random.Generator, text: np.ndarray, distances: tuple[int, ...], pairs: int) -> Planted:
    """A row of max(distances) + 34 * questions + 608 ids that ends with its questions: `pairs` for each distance.

    Pairs told side by side mislead each other: they look the same.
    """
    questions, end = pairs * len(distances), max(distances) + 8
    asked = [(end, int(distance)) for distance in rng.permutation(np.repeat(distances, pairs))]
    planted = plant(rng, text, end + 34 * questions + 600, asked)
    assert len(planted.answers) == questions, "a verse longer than the room for it"
    return planted


def _names(rng, count):
    """Different names of three syllables."""
    names: dict[str, None] = {}
    while len(names) < count:
        letters = [_CONSONANTS[rng.integers(len(_CONSONANTS))] + _VOWELS[rng.integers(len(_VOWELS))] for _ in range(3)]
        names["".join(letters).capitalize()] = None
    return list(names)
