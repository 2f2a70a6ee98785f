"""Reinforcement learning in one process (GRPO): `python examples/grpo/grpo.py --help`."""

import contextlib
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from flax import nnx
from rich.console import Console

from dsv4_jax import (
    DeepseekV4ForCausalLM,
    DSV4Config,
    Engine,
    KVCacheManager,
    PrefixCache,
    PromptLookup,
    SamplingParams,
    set_xla_flags,
)
from dsv4_jax.config import LayerSpec
from dsv4_jax.decode import logprobs
from dsv4_jax.engine.generate import prefill
from dsv4_jax.engine.requests import Request
from dsv4_jax.nn import shardings
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh


DIGITS = 10  # tokens 0 to 9 are digits; the model has to learn not to use the others
CONFIG = DSV4Config.small([LayerSpec.csa(), LayerSpec.hca(16)], vocab_size=16)
BLOCK_TOKENS = 16
PREAMBLE = [10] * BLOCK_TOKENS  # begins all prompts, so that the prefix cache has a block for them
MAX_PROMPT = BLOCK_TOKENS + 8
SLOTS = 32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a run, which determine its result.

    Attributes:
      iterations: number of rollouts.
      prompts: number of prompts in a rollout, at most 32, the engine's slots.
      group: number of answers to each prompt. An answer's advantage is its reward relative to its group.
      new_tokens: number of tokens in an answer.
      updates: number of gradient steps on each rollout.
      learning_rate: learning rate of Adam.
      clip: clipping range of PPO's loss: a token's probability ratio gains nothing beyond 1 - clip .. 1 + clip.
      drafts: maximum number of draft tokens of a request in a step; they are looked up in the request's own text.
      kv_format: format of the cache, in rollouts and in training.
      seed: seed of the weights, the prompts and the answers.
      mesh: devices of rollouts and of training, such as "data=2,model=2"; "" = one device.
    """

    iterations: int = 50
    prompts: int = 8
    group: int = 16
    new_tokens: int = 12
    updates: int = 2
    learning_rate: float = 3e-3
    clip: float = 0.2
    drafts: int = 0
    kv_format: str = "v4"
    seed: int = 0
    mesh: str = ""

    def __post_init__(self):
        if not 1 <= self.prompts <= SLOTS:
            raise ValueError(f"prompts={self.prompts} must be from 1 to {SLOTS}, the engine's slots")
        if self.group < 2:
            raise ValueError(
                f"group={self.group} must be at least 2: an answer is compared with the others of its group"
            )

    @property
    def devices(self) -> Any:
        """The mesh of devices; None = one device."""
        return make_mesh(parse_mesh(self.mesh)) if self.mesh else None


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The answers to a batch of prompts, S sequences padded to N tokens.

    Attributes:
      tokens: [S, N] int32, prompts and answers.
      lengths: [S] int32, number of tokens in each sequence, without padding.
      is_answer: [S, N] bool, whether a token was generated.
      old_logprobs: [S, N] float32, log-probabilities of generated tokens as the engine reported them; 0 elsewhere.
      versions: [S, N] int32, number of weight updates before each token was drawn; 0 outside answers.
      rewards: [S] float32, reward of each answer.
    """

    tokens: Any
    lengths: Any
    is_answer: Any
    old_logprobs: Any
    versions: Any
    rewards: Any


def reward(prompt: list[int], answer: list[int]) -> float:
    """Returns the share of an answer's tokens that count on: the preceding token plus 1, where 0 follows 9."""
    sequence = [prompt[-1], *answer]
    return float(np.mean([b == (a + 1) % DIGITS and a < DIGITS for a, b in zip(sequence, answer, strict=False)]))


def make_engine(model: Any, recipe: Recipe) -> Engine:
    """Returns an engine with a prefix cache, and with so few blocks that requests are preempted."""
    manager = KVCacheManager(
        CONFIG,
        num_blocks=SLOTS * 5 // 4,
        max_requests=SLOTS,
        max_context=MAX_PROMPT + recipe.new_tokens,
        block_tokens=BLOCK_TOKENS,
        kv_format=recipe.kv_format,
        dtype=jnp.float32,
        max_query_tokens=1 + recipe.drafts,
        mesh=recipe.devices,
    )
    drafter = PromptLookup() if recipe.drafts else None
    budget = SLOTS * (1 + recipe.drafts)
    prefix = PrefixCache(manager, key="grpo")
    return Engine(model, manager, token_budget=budget, batch_invariant=True, drafter=drafter, prefix=prefix)


def roll_out(engine: Engine, recipe: Recipe, iteration: int, version: int) -> Rollout:
    """Draws a group of answers to each of an iteration's prompts. The answers of a group fork from one request.

    `version` is the number of weight updates before the rollout, which `Rollout.versions` records.
    """
    rng = np.random.default_rng([recipe.seed, iteration])
    sizes = rng.integers(1, 1 + MAX_PROMPT - len(PREAMBLE), size=recipe.prompts)
    prompts = [PREAMBLE + rng.integers(DIGITS, size=size).tolist() for size in sizes]
    seeds = rng.integers(2**31, size=(recipe.prompts, recipe.group)).tolist()
    options: Any = {"max_new_tokens": recipe.new_tokens, "sampling": SamplingParams(temperature=1.0)}
    parents = []
    for prompt, group_seeds in zip(prompts, seeds, strict=True):
        parents.append(engine.add(prompt, seed=group_seeds[0], **options))
        prefill(engine, parents[-1:])  # the next prompt finds the preamble in the prefix cache
    requests: list[Request] = []
    for parent, group_seeds in zip(parents, seeds, strict=True):
        requests += [parent, *engine.fork(parent, group_seeds[1:])]
    shape = len(requests), MAX_PROMPT + recipe.new_tokens
    versions = np.zeros(shape, np.int32)
    rows = {request: row for row, request in enumerate(requests)}
    while engine.busy:
        for request, new in engine.step():
            versions[rows[request], request.num_tokens - len(new) : request.num_tokens] = version
    tokens = np.zeros(shape, np.int32)
    is_answer = np.zeros(shape, bool)
    old_logprobs = np.zeros(shape, np.float32)
    for request, row in rows.items():
        tokens[row, : request.num_tokens] = request.tokens
        is_answer[row, request.prompt_length : request.num_tokens] = True
        old_logprobs[row, request.prompt_length : request.num_tokens] = request.logprobs
    lengths = np.array([request.num_tokens for request in requests], np.int32)
    rewards = np.array([reward(request.prompt, request.generated) for request in requests], np.float32)
    return Rollout(*map(jnp.asarray, (tokens, lengths, is_answer, old_logprobs, versions, rewards)))


def _is_float(_, value):
    return jnp.issubdtype(value.get_value().dtype, jnp.floating)


class Learner:
    """The trained weights and the state of the optimizer.

    Attributes:
      recipe: settings of the run.
      state: {"floats": weights, "optimizer": state of Adam}.
    """

    def __init__(self, recipe: Recipe, model: nnx.Module):
        self.recipe = recipe
        self._graph, floats, self._others = nnx.split(model, _is_float, ...)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(recipe.learning_rate))
        # In the context of the mesh, Adam's counter of steps lies on the mesh from the start, as it does after a step.
        # So `_step` is compiled only once.
        with contextlib.nullcontext() if recipe.devices is None else jax.set_mesh(recipe.devices):
            self.state: Any = {"floats": floats, "optimizer": self._optimizer.init(floats)}

    @property
    def model(self) -> Any:
        """The model with the trained weights."""
        return nnx.merge(self._graph, self.state["floats"], self._others)

    def update(self, rollout: Rollout, engine: Engine) -> dict[str, float]:
        """Makes a gradient step. Returns its metrics, computed with the weights before the step."""
        self.state, metrics = self._step(self.state, engine.rollout_shape, **vars(rollout))
        return {name: float(value) for name, value in metrics.items()}

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def _step(self, state, shape, *, tokens, lengths, is_answer, old_logprobs, rewards, **unused):
        groups = rewards.reshape(-1, self.recipe.group)
        advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
        advantages = advantages.reshape(-1, 1)

        def loss_of(floats):
            model: Any = nnx.merge(self._graph, floats, self._others)
            new_logprobs = logprobs(model, tokens, lengths, shape)
            ratio = jnp.exp(jnp.where(is_answer, new_logprobs - old_logprobs, 0.0))
            clipped = jnp.clip(ratio, 1 - self.recipe.clip, 1 + self.recipe.clip)
            gain = jnp.minimum(ratio * advantages, clipped * advantages)
            difference = jnp.max(jnp.where(is_answer, jnp.abs(new_logprobs - old_logprobs), 0.0))
            return -jnp.mean(gain, where=is_answer), difference

        (loss, difference), gradient = jax.value_and_grad(loss_of, has_aux=True)(state["floats"])
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, optimizer = self._optimizer.update(gradient, state["optimizer"], state["floats"])
        metrics = {"loss": loss, "difference": difference, "gradient": optax.tree.norm(gradient)}
        return {"floats": optax.apply_updates(state["floats"], updates), "optimizer": optimizer}, metrics


def train(recipe: Recipe, folder: Path | None = None, console: Console | None = None) -> list[dict[str, Any]]:
    """Trains a model from random weights.

    Args:
      recipe: the settings.
      folder: folder for the log and for the state of the training, from which the next call with this folder continues;
        None = nothing is stored.
      console: prints a line for each iteration; None = prints nothing.

    Returns:
      A dict for each iteration: "reward" and "untrained" are the mean rewards of the trained and of the untrained
      policy on the same prompts. "difference" is the largest difference of log-probabilities between rollout and
      training. Further entries are the loss, the norm of the gradient, times in seconds and numbers of preemptions.
    """
    model = DeepseekV4ForCausalLM(CONFIG, jnp.float32, rngs=nnx.Rngs(recipe.seed))
    mesh = recipe.devices
    learner = Learner(recipe, model if mesh is None else jax.device_put(model, shardings(model, mesh)))
    untrained = make_engine(learner.model, recipe)
    engine = make_engine(learner.model, recipe)
    lines: list[dict[str, Any]] = []
    checkpoints = None
    if folder is not None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        checkpoints = ocp.CheckpointManager((folder / "state").absolute(), options=options)
        if (restored_step := checkpoints.latest_step()) is not None:
            earlier = json.loads((folder / "recipe.json").read_text())
            changed = [name for name, value in dataclasses.asdict(recipe).items() if earlier.get(name, "") != value]
            if {*changed} - {"iterations"}:
                raise ValueError(f"{folder} has a run with other settings ({', '.join(changed)}): use another folder")
            learner.state = checkpoints.restore(restored_step, args=ocp.args.StandardRestore(learner.state))
            if mesh is None:  # restored arrays are committed to the device, so that `_step` would compile again
                learner.state = jax.tree.map(jnp.asarray, jax.device_get(learner.state))
            lines = json.loads((folder / "log.json").read_text())[:restored_step]
        (folder / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe)))
    for iteration in range(len(lines), recipe.iterations):
        begin = time.monotonic()
        engine.update_weights(learner.model)
        rollout = roll_out(engine, recipe, iteration, version=iteration * recipe.updates)
        rolled_out = time.monotonic()
        metrics = [learner.update(rollout, engine) for _ in range(recipe.updates)]
        line = metrics[0] | {"iteration": iteration, "reward": float(rollout.rewards.mean())}
        line |= {"seconds_rollout": rolled_out - begin, "seconds_training": time.monotonic() - rolled_out}
        line["untrained"] = float(roll_out(untrained, recipe, iteration, version=0).rewards.mean())
        line["preemptions"] = engine.metrics.preemptions
        lines.append(line)
        if console is not None:
            console.print({name: round(value, 4) for name, value in line.items()})
        if folder is not None and checkpoints is not None:
            (folder / "log.json").write_text(json.dumps(lines))
            checkpoints.save(iteration + 1, args=ocp.args.StandardSave(learner.state))
    if checkpoints is not None:
        checkpoints.close()
    return lines


def plot(runs: list[list[dict[str, Any]]], path: Path) -> None:
    """Plots the mean reward over seeds with its standard deviation, and the largest difference of log-probabilities."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for name, label in {"reward": "GRPO", "untrained": "untrained policy"}.items():
        rewards = np.array([[line[name] for line in lines] for lines in runs])
        mean = rewards.mean(0)
        above.plot(mean, label=f"{label}, {len(runs)} seeds")
        above.fill_between(range(len(mean)), mean - rewards.std(0), mean + rewards.std(0), alpha=0.2)
    above.set_ylabel("reward")
    above.set_ylim(0, 1)
    above.legend()
    below.plot(np.max([[line["difference"] for line in lines] for lines in runs], axis=0))
    below.set_ylabel("largest difference of\nlog-probabilities")
    below.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path)


@dataclasses.dataclass(frozen=True)
class Command:
    """Trains a small DeepSeek-V4 to count, by GRPO in one process, and plots rewards of several seeds.

    The engine's rollouts and the training use the same cache format and steps of the same shapes, so their
    log-probabilities are equal to the last bit. A second run with the same options continues where the first stopped.

    Attributes:
      out: folder for logs, states and the plot.
      recipe: the settings of a run.
      seeds: number of runs, with seeds from `recipe.seed` on.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    recipe: tyro.conf.OmitArgPrefixes[Recipe] = Recipe()
    seeds: int = 1

    def run(self) -> None:
        """Trains all seeds and plots them."""
        runs = []
        for seed in range(self.recipe.seed, self.recipe.seed + self.seeds):
            folder = self.out / f"seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            runs.append(train(dataclasses.replace(self.recipe, seed=seed), folder, Console()))
        plot(runs, self.out / "reward.png")


if __name__ == "__main__":
    set_xla_flags()
    tyro.cli(Command).run()
