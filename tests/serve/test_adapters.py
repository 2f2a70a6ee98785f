"""Adapters beside a served model, each under its own name in the API."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from dsv4_jax.checkpoint import save_adapter, save_release
from dsv4_jax.cli.serve_command import ServeCommand
from dsv4_jax.nn import DeepseekV4ForCausalLM, add_adapters, parameter_views
from dsv4_jax.serve import ServerOptions
from tests.serve.conftest import serving


@pytest.fixture(scope="module")
def server(bytes_model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    _, config = bytes_model
    model = DeepseekV4ForCausalLM(config)
    save_release(model, folder)
    add_adapters(model, ["a", "b"], rank=2, targets=["o_b_proj"])
    rng = np.random.default_rng(0)
    for path, view in parameter_views(model).items():
        if path.endswith(".up"):
            view.set_value(jnp.asarray(0.2 * rng.standard_normal(view.shape), jnp.float32))
    for name in ("a", "b"):
        save_adapter(model, name, folder / name)
    adapters = f"a={folder / 'a'},b={folder / 'b'}"
    command = ServeCommand(adapters=adapters, max_requests=4, structured_output=False, token_budget=32)
    others = [dataclasses.replace(command, adapters=given) for given in (f"b={folder / 'b'}", None)]
    # Prefixes on disk belong to these weights.
    assert len({one.weights_key(folder) for one in (command, *others)}) == 3
    engine = command._engine(folder, config, 128, "tiny")
    with serving(engine, tokenizer, adapters=("a", "b")) as server:
        yield server


def test_a_request_names_its_adapter(server):
    assert [model.id for model in server.client.models.list()] == ["tiny", "a", "b"]

    def answer(model):
        options = {"prompt": "In the beginning God created", "max_tokens": 24, "temperature": 0}
        made = server.client.completions.create(model=model, **options)
        assert made.model == model
        return made.choices[0].text, made.usage.prompt_tokens_details.cached_tokens

    texts = {model: answer(model) for model in ("tiny", "a", "b")}
    assert len({*texts.values()}) == 3 and {cached for _, cached in texts.values()} == {0}
    chat = server.client.chat.completions.create(model="a", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    assert chat.model == "a"
    with pytest.raises(openai.NotFoundError, match="there is no model 'c'; this server has 'tiny', 'a', 'b'"):
        answer("c")


def test_an_adapter_does_not_take_the_name_of_the_model():
    """Otherwise requests for the model would get the adapter."""
    with pytest.raises(ValueError, match=r"model_name='a' and adapters=\('b', 'a'\) must be different names"):
        ServerOptions("a", adapters=("b", "a"))
