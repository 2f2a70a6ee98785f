"""An HTTP server with OpenAI's and Anthropic's APIs: an ASGI application, and an engine in its own thread."""

from dsv4_jax.serve.app import create_app
from dsv4_jax.serve.async_engine import AsyncEngine, Generation, Update
from dsv4_jax.serve.server import HTTPServer
from dsv4_jax.serve.service import ServerOptions
