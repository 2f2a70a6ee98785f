"""Errors that are sent to clients, in the formats of OpenAI's and Anthropic's APIs."""

import dataclasses
from typing import Any

from starlette.responses import JSONResponse


MESSAGES_PATH = "/v1/messages"


@dataclasses.dataclass(eq=False)
class APIError(Exception):
    """An error that is sent to the client.

    Attributes:
      message: description of the error for people.
      status: HTTP status of the response.
      param: name of the wrong field in the body, or None.
      code: identifier of the error for programs, such as "context_length_exceeded", or None.
      headers: additional headers of the response, or None.
      details: additional data for programs, sent in Anthropic's format only; or None.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None
    details: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The response's JSON in Anthropic's format."""
        kind = self.body["error"]["type"].replace("server_error", "api_error")
        details = {"details": self.details} if self.details else {}
        return {"type": "error", "error": {"type": kind, "message": self.message} | details}

    def response(self, path: str = "") -> JSONResponse:
        """Returns the response to a request for `path`, which decides between OpenAI's and Anthropic's format."""
        return JSONResponse(
            self.anthropic_body if path.startswith(MESSAGES_PATH) else self.body, self.status, self.headers
        )


def unavailable(message: str) -> APIError:
    """Returns an error with status 503, for a server that takes no requests at the moment."""
    return APIError(message, 503, code="unavailable", headers={"Retry-After": "1"})
