"""The ASGI application: endpoints, limits on requests, and API keys."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import logging
import time
from importlib import resources
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from tokenizers import Tokenizer

from dsv4_jax.serve.answers import CompletionAnswer, EventStream
from dsv4_jax.serve.async_engine import AsyncEngine
from dsv4_jax.serve.chat_answers import ChatAnswer, MessagesAnswer, ResponsesAnswer, TokenCount
from dsv4_jax.serve.errors import MESSAGES_PATH, APIError, unavailable
from dsv4_jax.serve.protocol import parse
from dsv4_jax.serve.service import ServerOptions, Service


_log = logging.getLogger("dsv4_jax.serve")
_BODY_SECONDS = 30.0  # time limit for receiving a body


def create_app(engine: AsyncEngine, tokenizer: Tokenizer | None, options: ServerOptions) -> Starlette:
    """Makes the ASGI application, which runs the engine's thread from its startup to its shutdown.

    Args:
      engine: an engine that no other application uses.
      tokenizer: tokenizer from `read_tokenizer`. None: the server takes and returns token ids only.
      options: the server's options.
    """
    service = Service(engine, tokenizer, options)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        """Runs the engine's thread while the application runs."""
        engine.start()
        yield
        await engine.stop()

    async def answer_error(request, error):
        """Turns an exception of an endpoint into a response."""
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path[:200]}: {error.detail}"
            error = APIError(message, error.status_code, headers=dict(error.headers or {}))
        elif not isinstance(error, APIError):
            error = APIError("the server failed; its log says more", 500)
        return error.response(request.url.path)

    pages = {
        "/": _demo,
        "/health": _health,
        "/ready": _ready,
        "/metrics": _metrics,
        "/v1/models": _models,
        "/v1/models/{name:path}": _models,
    }
    answers = {
        "/v1/completions": CompletionAnswer,
        "/v1/chat/completions": ChatAnswer,
        "/v1/responses": ResponsesAnswer,
        MESSAGES_PATH: MessagesAnswer,
        f"{MESSAGES_PATH}/count_tokens": TokenCount,
    }
    routes = [Route(path, functools.partial(page, service)) for path, page in pages.items()]
    routes += [
        Route(path, functools.partial(_answer, service, kind), methods=["POST"]) for path, kind in answers.items()
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((APIError, HTTPException, Exception), answer_error),
    )
    app.router.redirect_slashes = False
    app.add_middleware(AuthMiddleware, service=service)
    app.state.service = service
    return app


@dataclasses.dataclass
class AuthMiddleware:
    """Middleware that rejects requests without the API key or for an unknown host, and counts responses."""

    app: ASGIApp
    service: Service

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        paths = [route.path for route in scope["app"].routes]
        label = scope["path"] if scope["path"] in paths else "other"

        async def count(message):
            """Sends a message, and counts the response at its start."""
            if message["type"] == "http.response.start":
                self.service.metrics.responses.labels(label, message["status"]).inc()
            await send(message)

        refusal = self._refuse(scope["path"], dict(scope["headers"]))
        app = self.app if refusal is None else refusal.response(scope["path"])
        await app(scope, receive, count)

    def _refuse(self, path, headers):
        """Returns the error for a request that is not authorized, or None."""
        hosts = self.service.options.allowed_hosts
        for name in (b"host", b"origin"):
            if hosts is not None and name in headers and (host := _host_of(headers[name])) not in hosts:
                known = ", ".join(sorted(hosts))
                return APIError(f"{name.decode()} {host!r} is none of {known}: --allowed-hosts adds names", 403)
        key = self.service.options.api_key
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = token.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # for Anthropic's clients
        if path.startswith("/v1") and key is not None and not hmac.compare_digest(sent, key.encode()):
            message = "this server needs its API key: Authorization: Bearer KEY"
            return APIError(message, 401, headers={"WWW-Authenticate": "Bearer"})
        return None


def _host_of(header):
    """Returns the host's name in a header Host or Origin, without scheme and port."""
    _, _, address = header.decode("latin-1").rpartition("//")
    try:
        return urlsplit(f"//{address}").hostname or address
    except ValueError:
        return address


async def _demo(service, request):
    return FileResponse(str(resources.files("dsv4_jax.serve") / "demo.html"))


async def _health(service, request):
    alive = service.engine.alive
    return JSONResponse({"status": "ok" if alive else "the engine's thread has ended"}, 200 if alive else 503)


async def _ready(service, request):
    status = "stopping" if service.stopping else "ready" if service.engine.ready else "compiling programs"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _metrics(service, request):
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _models(service, request):
    """Describes the model that the path names, or lists all models."""
    name = request.path_params.get("name")
    model = {
        "object": "model",
        "created": service.created,
        "owned_by": "dsv4_jax",
        "max_model_len": service.manager.schema.max_context,
    }
    if name is None:
        return JSONResponse({"object": "list", "data": [{"id": name} | model for name in service.options.models]})
    _check_model(service, name)
    return JSONResponse({"id": name} | model)


def _check_model(service, name):
    if name not in (models := service.options.models):
        message = f"there is no model {name[:200]!r}; this server has {', '.join(map(repr, models))}"
        raise APIError(message, 404, param="model", code="model_not_found")


async def _answer(service, kind, request):
    """Answers a request with an `Answer` of the class `kind`."""
    start = time.monotonic()
    if service.stopping:
        raise unavailable("the server is stopping and takes no new requests")
    if not service.engine.alive:
        raise APIError("the engine's thread has ended; the server's log says more", 500)
    content = await _read(request, service.max_body_bytes)

    # A long body is parsed in another thread, so that the event loop can serve other requests meanwhile.
    body = await asyncio.to_thread(parse, kind.body_type, content)
    _check_model(service, body.model)
    answer = await asyncio.to_thread(kind, service, body, start)
    answer.submit()
    response = EventStream(answer) if body.stream else await _complete_or_cancel(request, answer)
    response.headers.update(answer.headers)
    return response


async def _read(request, limit):
    """Receives the body of a request, of at most `limit` bytes.

    The content type must be application/json. Browsers let pages of other sites send simpler types without asking.

    Raises:
      APIError: the body has another type, is too long, does not arrive in time or is incomplete.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise APIError(f"Content-Type is {content_type[:100]!r}, it must be application/json", 415)
    too_long = APIError(f"the body is longer than {limit} bytes", 413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise too_long
    except TimeoutError:
        raise APIError(f"the body did not arrive within {_BODY_SECONDS:.0f} seconds", 408) from None
    except ClientDisconnect:
        raise APIError("the client left before its body was complete") from None
    return bytes(content)


async def _complete_or_cancel(request, answer):
    """Waits for the complete answer and returns it. If the client disconnects first, cancels the answer's requests."""

    async def cancel_at_disconnect():
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    disconnect = asyncio.create_task(cancel_at_disconnect())
    try:
        return await answer.complete()
    except APIError:
        if not disconnect.done():
            raise
        return Response(status_code=499)  # the client does not read this status, but the metrics count it
    finally:
        answer.cancel()
        disconnect.cancel()
