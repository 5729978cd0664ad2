"""The outermost layer: ids, counting, refusals, and the answer when our own code fails.

`scope["state"]` gets `request_id` (ours) and `client_request_id` (checked, or empty). An answer carries the client's
id in `x-request-id` (and in `request-id`, as Anthropic's clients want it), ours if there is none, and always ours in
`x-twostroke-request-id`: two requests may come with one id (FIELD-REPORTS E24), so everything inside, and Cancel over
gRPC, goes by ours.

What an endpoint raises before it answers, a TwostrokeError or an HTTPException, is told in its API's form; anything
else is a bug, logged and told as an internal error. Starlette's own application would do the same through two more
layers, which each request and each piece of a stream pass.
"""

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.cluster.core.errors import BodyTooLarge, InternalError, InvalidRequest, TwostrokeError
from twostroke.cluster.core.ids import new_request_id
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.body import drain
from twostroke.router.gateway.errors import HTTP_CODES, refusal
from twostroke.router.prepare import check_client_request_id

log = structlog.get_logger(__name__)


class Edge:
    """An ASGI application around one of routes."""

    def __init__(self, routes: ASGIApp, metrics: RouterMetrics, openapi: dict[str, object]) -> None:
        """`openapi`: the document that describes it."""
        self._routes = routes
        self._metrics = metrics
        self.openapi = openapi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that routes raise for what they do not know, instead of answering
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        request_id = new_request_id()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        own = request_id.encode()
        extra = [(b"x-request-id", own), (b"request-id", own), (b"x-twostroke-request-id", own)]
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], *extra]}
                self._metrics.http_responses.of(_endpoint(scope), str(message["status"])).inc()
            await send(message)

        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "client_request_id": ""}
        try:
            check_client_request_id(given)
        except InvalidRequest as error:
            await refusal(error, scope)(scope, receive, send_named)
            return
        if given:
            extra[:2] = [(name, given.encode()) for name, _ in extra[:2]]
        scope["state"]["client_request_id"] = given
        try:
            await self._routes(scope, receive, send_named)
        except ClientDisconnect:
            return
        except Exception as error:
            if started or not isinstance(error, TwostrokeError | HTTPException):
                log.exception("http_failed", request_id=request_id)
                self._metrics.refusals.of(InternalError.code).inc()
            if started:
                raise
            await self._failure(error, scope)(scope, receive, send_named)

    def _failure(self, error: Exception, scope: Scope) -> Response:
        """The answer to what was not submitted; logged and counted for the endpoints that generate."""
        if isinstance(error, TwostrokeError):
            code = error.code
        elif isinstance(error, HTTPException):
            code = HTTP_CODES.get(error.status_code, "http_error")
        else:
            return refusal(InternalError(f"an unexpected {type(error).__name__}"), scope)
        response = refusal(error, scope)
        if scope["method"] == "POST":
            self._metrics.refusals.of(code).inc()
            state = scope["state"]
            log_request(
                log,
                request_id=state["request_id"],
                outcome=code,
                endpoint=_endpoint(scope),
                client_request_id=state["client_request_id"],
            )
        if isinstance(error, BodyTooLarge) or code in ("request_timeout", "unsupported_media_type"):
            return _ClosingResponse(response)
        return response


def _endpoint(scope: Scope) -> str:
    """Never the path itself: labels come from a small fixed set."""
    route = scope.get("route")
    return "" if route is None else str(route.path)


class _ClosingResponse(Response):
    """An answer to a body that was not read to its end: the connection ends with it."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code, {**response.headers, "connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
