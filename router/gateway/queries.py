"""Models, health and metrics: what is answered from memory."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from twostroke.cluster.core.errors import Unavailable, UnknownModel
from twostroke.cluster.telemetry.metrics import exposition
from twostroke.router.gateway.errors import error_response, json_response
from twostroke.router.request import Generator, ServedModel


class Queries:
    def __init__(self, generator: Generator, registry: CollectorRegistry) -> None:
        self._generator = generator
        self._registry = registry

    async def models(self, request: Request) -> Response:
        model = self._generator.model
        return json_response({"object": "list", "data": [] if model is None else [_model_card(model)]})

    async def model(self, request: Request) -> Response:
        wanted = str(request.path_params["model"])
        served = self._generator.model
        if served is None or served.name != wanted:
            raise UnknownModel(f"model {wanted[:128]!r} is not served here", "model")
        return json_response(_model_card(served))

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if self._generator.ready:
            return json_response({"status": "ready", **self._counts()})
        return error_response(Unavailable(self._reason()))

    def _counts(self) -> dict[str, int]:
        model = self._generator.model
        prefill, decode = (model.num_prefill_workers, model.num_decode_workers) if model is not None else (0, 0)
        return {"prefill_workers": prefill, "decode_workers": decode}

    def _reason(self) -> str:
        model = self._generator.model
        if model is None:
            return "no worker is attached"
        if not model.num_decode_workers:
            return "no decode worker is attached"
        if not model.num_prefill_workers:
            return "no prefill worker is attached: none is there, or none has shipped a page yet"
        return "no pair of workers takes work, or the router drains"

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._registry), media_type=CONTENT_TYPE_LATEST)


def _model_card(model: ServedModel) -> dict[str, object]:
    # The API wants a time of creation, which nobody knows of a model on a disk.
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "twostroke",
        "max_model_len": model.max_context,
    }
