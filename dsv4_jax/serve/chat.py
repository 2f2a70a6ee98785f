"""Encodes the messages of a chat as token ids."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from dsv4_jax.serve.protocol import Message


# Tokens of the release's encoding, encoding/encoding_dsv4.py beside the release's weights.
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT, _NO_THINKING = "<｜User｜>", "<｜Assistant｜>", "</think>"


class ChatTemplate:
    """Renders messages as a prompt that ends where the assistant's answer begins.

    If the tokenizer has the release's tokens, this is the release's encoding without thinking:
    `<bos>{system}<｜User｜>{user}<｜Assistant｜></think>{assistant}<eos>..`. Otherwise it is plain text, a paragraph
    for each message: `System: ..`, `User: ..`, `Assistant: ..`. The answer then ends where the model writes `User:`.

    Attributes:
      stops: strings that end the answer, in addition to the client's.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        tokens = (_BEGIN, _END, _USER, _ASSISTANT, _NO_THINKING)
        self._is_release = all(tokenizer.token_to_id(token) is not None for token in tokens)
        self.stops: tuple[str, ...] = () if self._is_release else ("\n\nUser:",)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the prompt as text."""
        if not self._is_release:
            paragraphs = [f"{message.role.capitalize()}: {message.text}\n\n" for message in messages]
            return "".join([*paragraphs, "Assistant:"])
        text, previous = _BEGIN, None
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            match message.role:
                case "user" if previous == "user":
                    text += "\n\n" + message.text
                case "user" | "developer":
                    text += _USER + message.text
                case "assistant":
                    text += message.text + _END
                case _:
                    text += message.text
            answered = following is None or following.role == "assistant"
            if message.role in ("user", "developer") and answered:
                text += _ASSISTANT + _NO_THINKING
            previous = message.role
        return text

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the prompt as token ids."""
        return self._tokenizer.encode(self.render(messages), add_special_tokens=not self._is_release).ids
