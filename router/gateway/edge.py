"""The outermost layer: ids, counting, and the answer when our own code fails.

`scope["state"]` gets `request_id` (ours) and `client_request_id` (checked, or empty). An answer carries the client's
id in `x-request-id` (and in `request-id`, as Anthropic's clients want it), ours if there is none, and always ours in
`x-twostroke-request-id`: two requests may come with one id (FIELD-REPORTS E24), so everything inside, and Cancel over
gRPC, goes by ours.
"""

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twostroke.cluster.core.errors import InternalError, InvalidRequest
from twostroke.cluster.core.ids import new_request_id
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.errors import refusal
from twostroke.router.prepare import check_client_request_id

log = structlog.get_logger(__name__)


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        extra = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id", b"x-twostroke-request-id")]
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], *extra]}
                route = scope.get("route")
                # Never the path itself: labels come from a small fixed set.
                self._metrics.http_responses.of(route.path if route is not None else "", str(message["status"])).inc()
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
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            return
        except Exception as error:
            log.exception("http_failed", request_id=request_id)
            self._metrics.refusals.of(InternalError.code).inc()
            if started:
                raise
            failure = InternalError(f"an unexpected {type(error).__name__}")
            await refusal(failure, scope)(scope, receive, send_named)
