"""Annotations are checked in tests: shapes by jaxtyping, other types by beartype (`type_checks.py`)."""

import beartype.roar
import jax.numpy as jnp
import jaxtyping
import pytest

from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.ops import apply_rope


def test_wrong_arguments_are_found():
    with pytest.raises(jaxtyping.TypeCheckError):  # positions of three tokens for two
        apply_rope(jnp.ones((2, 64)), jnp.arange(3), jnp.ones(32))
    with pytest.raises(beartype.roar.BeartypeCallHintViolation):
        parse_bytes(1.5)


def test_functions_check_their_arguments_themselves(untyped):
    with pytest.raises(TypeError, match=r"memory=1.5 must be an int \(bytes\) or text"):
        parse_bytes(1.5)
