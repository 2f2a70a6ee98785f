"""`dsv4-jax bench serve`: an engine with the packaged model serves conversations that share system prompts."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.bench.tables import Row, print_rows
from dsv4_jax.cache import request_rows as moves
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.data import BLOCK_TOKENS, packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import KVCacheManager, PrefixCache


SLOTS = 4  # maximum number of requests that run at a time
TOKEN_BUDGET = 192  # maximum number of tokens of a step
SYSTEM_PROMPTS = 2  # number of different system prompts
# Each pair is the minimum and maximum number of tokens of a system prompt, of a user's message, or of a reply.
SYSTEM_TOKENS = (280, 330)
MESSAGE_TOKENS = (16, 80)
REPLY_TOKENS = (16, 32)
COLUMNS = {
    "prefix cache": "{prefix_cache}",
    "sent": "{prompt_tokens_sent:,}",
    "run": "{prompt_tokens_run:,}",
    "hit rate": "{hit_rate:.1%}",
    "generated": "{generated_tokens:,}",
    "tokens/s": "{generated_tokens_per_second:,.1f}",
    "first token, ms": "{first_token_milliseconds[median]:,.0f}",
    "95 %": "{first_token_milliseconds[p95]:,.0f}",
    "accepted": "{acceptance:.1%}",
    "steps": "{steps:,}",
    "seconds": "{seconds:.2f}",
    "compilations": "{compilations} + {compilations_later}",
    "same tokens": "{same_tokens}",
}
# A script lists conversations. A conversation lists turns, each of which is a message of the user and a reply:
# (new tokens of the prompt, number of tokens of the reply).
Script = list[list[tuple[list[int], int]]]
# A run also counts the compilations of these jitted functions, which read, write or copy the bytes of requests.
MOVES: Any = moves.read_request, moves.write_request, moves.copy_request, moves.read_blocks, moves.write_blocks


@dataclasses.dataclass(frozen=True)
class Workload:
    """The conversations to serve, described by the options of `dsv4-jax bench serve`.

    A turn is a request that sends all earlier messages and replies of the conversation and a new message.

    Attributes:
      conversations: number of conversations.
      turns: number of turns of each conversation.
      drafts: maximum number of drafts that a step verifies for a request, made by prompt lookup; 0 for none.
      seed: seed of the random tokens and lengths.
    """

    conversations: int
    turns: int
    drafts: int = 0
    seed: int = 0

    @property
    def max_context(self) -> int:
        """The maximum number of tokens in a request, rounded up to whole blocks."""
        tokens = max(SYSTEM_TOKENS) + self.turns * (MESSAGE_TOKENS[1] + REPLY_TOKENS[1])
        return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    def script(self, vocabulary: int) -> Script:
        """Returns the new prompt tokens and the length of the reply, for each turn of each conversation."""
        rng = np.random.default_rng(self.seed)

        def ids(low, high):
            """Returns `low` to `high` random token ids."""
            # Token ids 0 and 1 are left out, because they mark the beginning and the end of a text.
            return rng.integers(2, vocabulary, size=rng.integers(low, high, endpoint=True)).tolist()

        systems = [ids(*SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        script = []
        for number in range(self.conversations):
            turns = [(ids(*MESSAGE_TOKENS), int(rng.integers(*REPLY_TOKENS, endpoint=True))) for _ in range(self.turns)]
            message, reply_length = turns[0]
            turns[0] = systems[number % SYSTEM_PROMPTS] + message, reply_length
            script.append(turns)
        return script


def run(workload: Workload, mesh: Mesh | None = None) -> Iterator[Row]:
    """Serves the workload without and then with a prefix cache; prints and yields the measurements of each.

    Args:
      workload: the conversations.
      mesh: devices to shard the model over; None for the default one.

    Raises:
      ValueError: the conversations would be longer than the model's context, or the mesh cannot shard the model.
    """
    config = read_config(packaged_checkpoint())
    if (longest := workload.max_context) > config.max_position_embeddings:
        raise ValueError(
            f"--turns {workload.turns} makes conversations of up to {longest} tokens, "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    print(
        f"{workload.conversations} conversations of {workload.turns} turns, packaged model, "
        f"{jax.devices()[0].device_kind}, {SLOTS} slots\n"
    )
    yield from print_rows(_measure(config, workload, mesh), COLUMNS)


def _measure(config, workload, mesh):
    """Yields the measurements without and then with a prefix cache."""
    model = CompiledModel(load_checkpoint(packaged_checkpoint(), mesh=mesh))
    replies = []
    for cached in (False, True):
        before = _compiled(model)
        # There are twice the blocks that running requests can hold, so that half of them can hold cached prefixes.
        manager = KVCacheManager(
            config,
            num_blocks=2 * SLOTS * workload.max_context // BLOCK_TOKENS,
            max_requests=SLOTS,
            max_context=workload.max_context,
            block_tokens=BLOCK_TOKENS,
            max_query_tokens=1 + workload.drafts,
            mesh=mesh,
        )
        engine = Engine(
            model,
            manager,
            token_budget=TOKEN_BUDGET,
            drafter=PromptLookup() if workload.drafts else None,
            prefix=PrefixCache(manager, key="packaged model") if cached else None,
        )
        engine.warm_up()
        compiled = _compiled(model)
        row, reply = _serve(engine, workload.script(config.vocab_size))
        replies.append(reply)
        yield row | {
            "compilations": compiled - before,
            "compilations_later": _compiled(model) - compiled,
            "same_tokens": reply == replies[0],
        }


def _serve(engine, script):
    """Serves all conversations. A conversation sends its next turn as soon as it has the previous turn's reply.

    Returns:
      (measurements, {(conversation, turn): tokens of the reply}).
    """
    sent = {}
    replies = {}
    first_tokens = []  # (number of tokens sent, milliseconds until the first token of the reply) of each request

    def send(conversation, turn, history):
        """Sends a turn, after the tokens of the conversation so far."""
        prompt, length = script[conversation][turn]
        request = engine.add(history + prompt, max_new_tokens=length)
        sent[request] = conversation, turn, time.perf_counter()

    begin = time.perf_counter()
    for conversation in range(len(script)):
        send(conversation, 0, [])
    while engine.busy:
        for output in engine.step():
            request = output.request
            conversation, turn, sent_at = sent[request]
            if len(request.generated) == len(output.tokens):
                first_tokens.append((len(request.prompt), 1e3 * (time.perf_counter() - sent_at)))
            if request.finish_reason is not None:
                replies[conversation, turn] = request.generated
                if turn + 1 < len(script[conversation]):
                    send(conversation, turn + 1, request.tokens.tolist())
    seconds = time.perf_counter() - begin
    metrics = engine.metrics
    tokens_sent = sum(tokens for tokens, _ in first_tokens)
    waits = sorted(wait for _, wait in first_tokens)
    measurements = {
        "prefix_cache": metrics.prefix is not None,
        "requests": metrics.finished,
        "prompt_tokens_sent": tokens_sent,
        "prompt_tokens_run": metrics.prompt_tokens,
        "generated_tokens": metrics.generated_tokens,
        "steps": metrics.steps,
        "seconds": seconds,
        "generated_tokens_per_second": metrics.generated_tokens / seconds,
        "first_token_milliseconds": {
            "median": statistics.median(waits),
            "p95": waits[int(0.95 * (len(waits) - 1))],
        },
        "hit_rate": 1 - metrics.prompt_tokens / tokens_sent,
        "acceptance": metrics.acceptance,
        "preemptions": metrics.preemptions,
        "first_tokens": first_tokens,
    }
    return measurements, replies


def _compiled(model):
    """Returns the number of programs compiled so far: those of the model, and those of `MOVES`."""
    return model.compilations + sum(program._cache_size() for program in MOVES)
