"""Runs the application with uvicorn, with a graceful shutdown."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from dsv4_jax.serve.service import Service


class HTTPServer(uvicorn.Server):
    """A uvicorn server that lets running requests finish when it is told to stop.

    After SIGTERM or SIGINT it takes no new requests. Requests that still run after `grace_seconds`, or at a second
    SIGINT, end with an error.
    """

    def __init__(self, app: Starlette, *, grace_seconds: float, access_log: bool = True):
        """Makes a server of an application from `create_app`. `run(sockets=[listen(..)])` runs it."""
        # Five more seconds to send the errors to clients.
        limit = int(grace_seconds) + 5
        config = uvicorn.Config(app, lifespan="on", access_log=access_log, timeout_graceful_shutdown=limit)
        super().__init__(config)
        self._service: Service = app.state.service
        self._grace_seconds = grace_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Overrides uvicorn's handler, which would raise the signal again after a graceful shutdown."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses new requests, then shuts down like uvicorn."""
        self._service.stopping = True
        asyncio.get_running_loop().call_later(self._grace_seconds, self._service.abort_all)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free one. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
