"""The command `dsv4-jax chat`."""

import contextlib
import http.client
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console

from dsv4_jax.cli.options import Command
from dsv4_jax.cli.startup import visible


_HELP = """/thinking off|low|high|max  how long the model thinks before it answers; with DeepSeek-V4.1 also 1 to 100
/system TEXT                instructions for a new conversation
/new                        begin a new conversation
/save FILE.json             write the conversation to a file
/quit, Ctrl-D               leave; Ctrl-C stops an answer"""


class ChatCommand(Command):
    """Chats in the terminal with the model of a running `dsv4-jax serve`.

    Any other server with OpenAI's Chat Completions will do as well. Thinking is shown dim, before the answer. The arrow
    keys bring back earlier lines, and /help lists the commands.

    For example:
      dsv4-jax serve --checkpoint path/to/folder      (in another terminal)
      dsv4-jax chat
      dsv4-jax chat --url http://127.0.0.1:8080 --thinking off

    Attributes:
      url: address of the server.
      api_key: the server's key. Default: the environment variable DSV4_JAX_API_KEY.
      thinking: off, low, high or max; with DeepSeek-V4.1 also a number from 1 to 100. Default: as the server does.
      system: instructions for the model.
      max_tokens: maximum number of tokens of an answer. Default: what fits the context.
      temperature: sampling temperature; 0 = greedy.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None
    thinking: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0

    def run(self) -> None:
        """Chats until the input ends. Raises ValueError if an option is wrong or no server answers."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url {self.url} must begin with http:// or https://")
        key = self.api_key or os.environ.get("DSV4_JAX_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        session = _Session(self.url.rstrip("/"), headers, options, self.system)
        if self.thinking is not None:
            session.think(self.thinking)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  its import gives `input` a history
        signal.signal(signal.SIGINT, signal.default_int_handler)
        model = options["model"] = session.find_model()  # the session sends these options with every message
        session.console.print(f"{visible(model)} at {self.url}. /help lists the commands.", style="dim")
        while session.read_line():
            pass


class _Session:
    """A conversation with a server, and the commands and messages that continue it."""

    def __init__(self, url, headers, options, system):
        self.console = Console(highlight=False, soft_wrap=True, markup=False)
        self._url = url
        self._headers = headers
        self._options = options
        self._begin(system)

    def _begin(self, system):
        """Begins a conversation with these instructions; None for no instructions."""
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def find_model(self):
        """Returns the name of the server's first model. Raises ValueError if the server refuses or is not there."""
        with self._open("/v1/models") as response:
            return json.load(response)["data"][0]["id"]

    def read_line(self):
        """Reads a line from the user, and runs it as a command or sends it as a message.

        Returns False if the user ends the chat.
        """
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return False
        try:
            if line.startswith("/"):
                return self._obey(*line.split(maxsplit=1))
            if line:
                self._answer({"role": "user", "content": line})
        except (ValueError, OSError, http.client.HTTPException) as error:
            self.console.print(visible(str(error)), style="red")
        return True

    def _obey(self, command, argument=None):
        """Runs a command. Returns False if it ends the chat. Raises ValueError if there is no such command."""
        match command, argument:
            case "/quit", None:
                return False
            case "/help", None:
                self.console.print(_HELP)
            case "/new", None:
                self._begin(self._system)
            case "/system", str():
                self._begin(argument)
            case "/thinking", str():
                self.think(argument)
            case "/save", str():
                Path(argument).write_text(json.dumps({"messages": self._messages}, ensure_ascii=False, indent=1))
                self.console.print(f"{len(self._messages)} messages written to {argument}", style="dim")
            case _:
                raise ValueError(f"{command}: there is no such command, or it takes something else. /help lists all.")
        return True

    def think(self, effort):
        """Sets how long the model thinks: "off", "low", "high", "max", or "1" to "100". Raises ValueError otherwise."""
        value = int(effort) if re.fullmatch("[0-9]{1,3}", effort) else effort
        if value not in ("off", "low", "high", "max", *range(1, 101)):
            raise ValueError(
                f"thinking {effort} must be off, low, high, max, or with DeepSeek-V4.1 a number from 1 to 100"
            )
        self._options.pop("reasoning_effort", None)
        self._options["thinking"] = {"type": "disabled" if value == "off" else "enabled"}
        if value != "off":
            self._options["reasoning_effort"] = value

    def _answer(self, question):
        """Sends a message and shows the answer while it arrives.

        If the answer has no content, neither the message nor the answer becomes part of the conversation.
        """
        parts = {"reasoning_content": "", "content": ""}
        usage = {}
        begin = time.monotonic()
        try:
            for chunk in self._stream([*self._messages, question]):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    for name in parts:
                        if new := choice["delta"].get(name):
                            self._show(name, new, is_first=not parts[name])
                            parts[name] += new
        except KeyboardInterrupt:
            self.console.print(" (stopped)", style="dim", end="")
        self.console.print()
        if usage:
            rate = usage["completion_tokens"] / (time.monotonic() - begin)
            hits = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            prompt = f"{hits} of {usage['prompt_tokens']} tokens of the prompt cached"
            self.console.print(f"{usage['completion_tokens']} tokens, {rate:.1f} a second, {prompt}", style="dim")
        if parts["content"]:
            self._messages += [question, {"role": "assistant"} | {name: part for name, part in parts.items() if part}]

    def _show(self, name, new, is_first):
        """Prints new text of the field `name`, the reasoning or the content of an answer."""
        if is_first and name == "content":
            self.console.print()
        shown = visible(new.lstrip("\n") if is_first else new)
        self.console.print(shown, style="dim" if name != "content" else None, end="")

    def _stream(self, messages):
        """Sends the messages, and yields each chunk of the answer, parsed from JSON."""
        with self._open("/v1/chat/completions", self._options | {"messages": messages}) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                yield chunk

    def _open(self, path, body=None):
        """Sends a request, with `body` as JSON if it is given. Returns the response; raises ValueError for an error."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                raise ValueError(json.load(error)["error"]["message"]) from None
            raise ValueError(f"{self._url}{path}: status {error.code}") from None
        except urllib.error.URLError as error:
            raise ValueError(
                f"no server answers at {self._url} ({error.reason}): start dsv4-jax serve, or give its --url"
            ) from None
