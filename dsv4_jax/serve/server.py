"""Runs the application with uvicorn, and ends it in good order."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from dsv4_jax.serve.app import Service


class HTTPServer(uvicorn.Server):
    """A uvicorn server that lets running requests end when it is told to stop.

    On SIGTERM or SIGINT it takes no new requests. Those that still run after `grace_seconds` end with an error; so do
    all of them at a second SIGINT.
    """

    def __init__(self, app: Starlette, *, grace_seconds: float, access_log: bool = True):
        """A server of an application from `create_app`; `run(sockets=[listen(..)])` runs it."""
        # Beyond the grace period: the time to tell the clients, for those that still read.
        limit = int(grace_seconds) + 5
        config = uvicorn.Config(app, lifespan="on", access_log=access_log, timeout_graceful_shutdown=limit)
        super().__init__(config)
        self._service: Service = app.state.service
        self._grace_seconds = grace_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """For uvicorn, which would otherwise raise the signal again when all has ended in good order."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """For uvicorn."""
        self._service.stopping = True
        asyncio.get_running_loop().call_later(self._grace_seconds, self._service.abort_all)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
