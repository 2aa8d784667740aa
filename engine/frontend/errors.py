"""What a client is told when a call fails: one exception, one JSON shape. Holds no state and knows no framework.

Every failure that a client may see is an `ApiError`; anything else that escapes becomes a 500 without details
(see `app.py`), so that no stack trace ever leaves the process.
"""

from __future__ import annotations

from typing import Any

CLIENT_GONE = 499
"""Status of a call whose client closed the connection or asked for its abort."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_aborted",
}


class ApiError(Exception):
    """A call that fails with an HTTP status.

    The text is one line that names the field, its value and what is allowed.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON answer, in the nested shape that OpenAI's clients read: {"error": {message, type, param, code}}."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code or self.status,
                "retryable": self.status in (429, 503),
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with the status: when to try again, which key is missing, or that the rest is not read."""
        if self.status in (429, 503):
            return {"retry-after": "1"}
        if self.status in (408, 413):
            return {"connection": "close"}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def invalid(field: str, complaint: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field: `invalid("sampling_params.n", "is 0: allowed is ...")`."""
    return ApiError(400, f"{field} {complaint}", param=field, code=code)
