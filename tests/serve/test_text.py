"""Text on its way to a client: whole characters, and nothing from a stop string on."""

import itertools

import deepseek_recipe as recipe
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dsv4_jax.decode import TopLogprobs
from dsv4_jax.engine import Request, RequestParams
from dsv4_jax.engine.text import AnswerText, StopStrings, stream_text, token_offsets
from dsv4_jax.serve.async_engine import Update
from dsv4_jax.serve.chat import make_chat
from dsv4_jax.serve.choices import Choice, ScoredToken, TokenNames
from dsv4_jax.serve.errors import APIError


def shown(answer, tokens):
    """What each token adds, and what comes at the end."""
    pieces = []
    for token in tokens:
        pieces.append(answer.add(token))
        if answer.stopped:
            return pieces
    return [*pieces, answer.finish()]


def test_characters_come_whole(tokenizer):
    text = "aé€😀b"
    pieces = shown(AnswerText(tokenizer, [256], []), text.encode())
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_a_character_are_replaced(tokenizer):
    assert shown(AnswerText(tokenizer, [256], []), b"a\xe2\x82b\xf0") == ["a", "", "", "\ufffdb", "", "\ufffd"]


def test_a_prompt_may_end_inside_a_character(tokenizer):
    first, *rest = "é".encode()
    assert shown(AnswerText(tokenizer, [97, first], []), rest) == ["é", ""]
    # The prompt shows its own incomplete character.
    assert shown(AnswerText(tokenizer, [97, first], []), b"") == [""]


def test_without_a_tokenizer_text_is_ids():
    assert shown(AnswerText(None, [5], []), [17, 42, 8]) == ["17", " 42", " 8", ""]


@pytest.mark.parametrize(
    ("stops", "pieces"),
    [
        (["lo w"], ["h", "e", "", "l", "", "", ""]),  # the first l is held back until the second comes
        (["world"], ["h", "e", "l", "l", "o", " ", "", "", "", "", ""]),
        (["world!", "ll"], ["h", "e", "", ""]),
        (["lx", "hello world!"], ["", "", "", "", "", "", "", "", "", "", "", "hello world"]),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(tokenizer, stops, pieces):
    assert shown(AnswerText(tokenizer, [256], stops), b"hello world") == pieces


@pytest.mark.usefixtures("untyped")
def test_stop_strings_that_would_end_other_answers_are_refused():
    with pytest.raises(TypeError, match=r"stop='end' must be a sequence of texts, such as \['end'\]"):
        StopStrings("end")
    with pytest.raises(ValueError, match=r"stop=\['a', ''\] has an empty text"):
        StopStrings(["a", ""])


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 11)),
)
def test_how_a_text_is_cut_into_pieces_makes_no_difference(text, stops, cuts):
    def run(pieces):
        stop = StopStrings(stops)
        out = ""
        for piece in pieces:
            out += stop.add(piece)
            if stop.found:
                return out, True
        return out + stop.finish(), False

    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    out, found = run([text[a:b] for a, b in itertools.pairwise(edges)])
    assert (out, found) == run(text)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert found == bool(ends)
    assert not found or any(text.startswith(out + stop) and len(out + stop) == min(ends) for stop in stops)


def test_tokens_of_a_prompt_begin_where_their_text_does(tokenizer):
    assert token_offsets(tokenizer, [256, *"aé€b".encode()]) == list(
        zip([256, *"aé€b".encode()], [0, 0, 1, 1, 2, 2, 2, 3], strict=True)
    )
    assert token_offsets(None, [17, 4, 9]) == [(17, 0), (4, 3), (9, 5)]


def test_tokens_in_shapes_of_openai(tokenizer):
    scored = [ScoredToken(256, None, [], 0), ScoredToken(0xC3, -2.0, [(97, -0.5), (0xC3, -2.0)], 0)]
    scored.append(ScoredToken(97, -3.0, [(98, -0.5)], 1))
    assert TokenNames(tokenizer).of_completion(scored, 2) == dict(
        tokens=["<bos>", "bytes:\\xc3", "a"],
        token_logprobs=[None, -2.0, -3.0],
        top_logprobs=[None, {"a": -0.5, "bytes:\\xc3": -2.0}, {"b": -0.5, "a": -3.0}],
        text_offset=[0, 0, 1],
    )
    part = dict(token="bytes:\\xc3", logprob=-2.0, bytes=[0xC3])
    (entry,) = TokenNames(tokenizer).of_chat(scored[1:2])["content"]
    assert entry == part | dict(top_logprobs=[dict(token="a", logprob=-0.5, bytes=[97]), part])
    assert TokenNames(None).of_completion(scored[2:], 0) == dict(
        tokens=["97"], token_logprobs=[-3.0], top_logprobs=None, text_offset=[1]
    )
    # JSON has no infinity: what cannot come has the number that vLLM sends.
    choice = Choice(0, AnswerText(tokenizer, [256], []), "")
    top = TopLogprobs(np.array([[97, 98]]), np.array([[-0.5, -np.inf]], np.float32))
    request = Request(0, np.array([256]), RequestParams(3, top_logprobs=2), order=0)
    request.extend([97], [-0.5], top=top)
    update = Update(0, request, 1)
    request.extend([98], [-0.5], top=top)  # the engine's thread goes on
    choice.take(update)
    assert choice.new_text == "a"
    assert choice.new_tokens == [ScoredToken(97, -0.5, [(97, -0.5), (98, -9999.0)], 0)]


def test_a_chat_without_the_releases_tokens_is_plain_text(tokenizer):
    chat = make_chat(tokenizer, ["tiny"], "0731")
    roles = [("system", "Be kind."), ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "</think>")]

    def convert(**options):
        messages = [dict(role=role, content=content) for role, content in roles]
        return chat.convert(recipe.ChatCompletionRequest, dict(model="tiny", messages=messages) | options)

    expected = "System: Be kind.\n\nUser: a\n\nUser: b\n\nAssistant: c\n\nUser: </think>\n\nAssistant:"
    assert chat.encode(convert().conversation) == [256, *expected.encode()] and chat.stops == ("\n\nUser:",)
    tool = dict(type="function", function=dict(name="f", parameters=dict(type="object")))
    deep: dict = {}
    for _ in range(200):
        deep = dict(a=deep)
    for options in [dict(thinking=deep), dict(tools=[tool | dict(x=10**400)])]:
        with pytest.raises(APIError, match="nesting depth|JSON number range"):
            convert(**options)
    for options in [dict(tools=[tool]), dict(thinking=dict(type="enabled"))]:
        with pytest.raises(APIError, match=f"{list(options)[0]}: this needs a tokenizer with the tokens of"):
            convert(**options)


@pytest.mark.usefixtures("untyped")
def test_text_in_text_out_from_python(tokenizer, monkeypatch):
    """Without the stop token and what follows a stop string; every step but the text's is `stream`."""
    asked = {}

    def tokens(model, manager, prompts, **options):
        asked.update(options, prompts=prompts)
        return ((0, token) for token in [*"l\u00e4\u00dft es Licht werden".encode(), 257, 65])

    monkeypatch.setattr("dsv4_jax.engine.text.stream", tokens)
    answer = list(stream_text(None, None, tokenizer, "Gott ", max_new_tokens=9, stop_tokens=(257,)))
    assert "".join(answer) == "l\u00e4\u00dft es Licht werden"
    assert asked == dict(prompts=[tokenizer.encode("Gott ").ids], max_new_tokens=9, stop_tokens=(257,))
    stopped = stream_text(None, None, tokenizer, "Gott ", stop=["Licht", "Wer"], max_new_tokens=9)
    assert "".join(stopped) == "l\u00e4\u00dft es "
