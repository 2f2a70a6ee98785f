"""A server with OpenAI's API: an engine in its own thread behind an ASGI application."""

from dsv4_jax.serve.app import create_app
from dsv4_jax.serve.async_engine import AsyncEngine, Generation, QueueFullError, Update
from dsv4_jax.serve.server import HTTPServer
from dsv4_jax.serve.service import ServerOptions
