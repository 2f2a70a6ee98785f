"""The HTTP server: uvicorn with limits on connections and a graceful shutdown."""

import asyncio
import resource
import signal
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv4_jax.serve.errors import APIError, unavailable
from dsv4_jax.serve.service import Service


_HEAD_SECONDS = 30.0  # time in which the head of a request must arrive; a connection that is silent longer is closed
# Connections leave this number of file descriptors free, for files and for connections that are being refused.
_SPARE_DESCRIPTORS = 64


class _Protocol(H11Protocol):
    """uvicorn's HTTP protocol with errors in the API's format, and with two limits.

    A request's head must arrive in time. If there are too many connections, the connection that has waited longest for
    a head is closed.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_DESCRIPTORS:
            connections: Any = self.connections  # all of this class
            silent = [c for c in connections if c._head_timer and not c.transport.is_closing()]
            oldest = min(silent, key=lambda c: c._head_timer.when(), default=self)
            oldest._refuse(unavailable("the server has too many connections"))
        self._watch_head()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self._watch_head()

    def data_received(self, data):
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg):
        """Sends an error in the API's format, in place of uvicorn's answer in plain text."""
        self._refuse(APIError(msg))

    def _watch_head(self):
        """Starts the timer if a request's head is expected and no timer runs.

        Stops the timer if the head is complete or the connection closes.
        """
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            error = APIError(f"the head of the request did not arrive within {_HEAD_SECONDS:g} seconds", 408)
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self._refuse, error)

    def _refuse(self, error):
        """Sends an error, unless a response has begun already, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            response = error.response()
            head = h11.Response(status_code=error.status, headers=[*response.raw_headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HTTPServer(uvicorn.Server):
    """A uvicorn server that lets running requests finish before it stops.

    After SIGTERM or SIGINT it refuses new requests. Requests that still run after `grace_seconds`, or at a second
    SIGINT, end with an error.
    """

    def __init__(self, app: Starlette, *, grace_seconds: float, access_log: bool = True):
        """Makes a server, to be run by `run(sockets=[..])`.

        Args:
          app: application from `create_app`.
          grace_seconds: time that running requests have to finish.
          access_log: whether to log each request.
        """
        # After the grace period, five more seconds remain to send errors to the clients.
        limit = int(grace_seconds) + 5
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="on", access_log=access_log, timeout_graceful_shutdown=limit
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._grace_seconds = grace_seconds

    def handle_exit(self, sig, frame):
        """Overrides uvicorn's handler of signals, which would raise the signal again after a graceful shutdown."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets=None):
        """Refuses new requests, waits for running ones up to `grace_seconds`, and shuts down as uvicorn does."""
        self._service.stopping = True
        error = unavailable("the server is stopping, and this request took too long")
        asyncio.get_running_loop().call_later(self._grace_seconds, self._service.engine.fail_all, error)
        await super().shutdown(sockets)
