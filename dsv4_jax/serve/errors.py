"""Errors in the format of OpenAI's API."""

import dataclasses
from typing import Any

from starlette.responses import JSONResponse


MESSAGES_PATH = "/v1/messages"


@dataclasses.dataclass(eq=False)
class APIError(Exception):
    """An error that is sent to the client.

    Attributes:
      status: status of the HTTP response.
      message: message for people.
      param: field of the body that is wrong, or None.
      code: code for programs, such as "context_length_exceeded", or None.
      headers: additional headers of the response.
      details: what programs read in Anthropic's format, or None.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None
    details: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON: {"error": {"message", "type", "param", "code"}}."""
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
        """Returns the response to a request of a path."""
        return JSONResponse(
            self.anthropic_body if path.startswith(MESSAGES_PATH) else self.body, self.status, self.headers
        )


def unavailable(message: str) -> APIError:
    """Returns the error of a server that does not take requests now."""
    return APIError(503, message, code="unavailable", headers={"Retry-After": "1"})
