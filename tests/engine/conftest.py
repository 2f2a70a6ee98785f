"""The model and geometries of the decode tests."""

from tests.decode.conftest import manager, model, roomy, small, tight, wide  # noqa: F401
