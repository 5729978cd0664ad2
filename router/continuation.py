"""Continuation tokens: where an answer stopped for want of budget, sealed for its client to send back (ADR 0010).

    begin      a request under a budget gets a `Continuation` without tokens, and ends after that many
    seal       its choice ended by the budget: the `Continuation` with all tokens so far goes out as text
    open       the same request comes with that text: signature, age and shape
    begin      it is this model's and this request's: the answer goes on after the tokens, under the budget again

    text = base64url(head, zlib(token ids), HMAC-SHA256 of both cut to 16 bytes)

The sampler's state needs no more: a token depends on the seed and its index, penalties and a grammar on the tokens
before it, which workers are given as after any loss (`core.messages.Submit.delivered`). Signed, not encrypted: it says
nothing that its client was not told.
"""

import base64
import hmac
import json
import secrets
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import structlog

from twostroke.cluster.config import BudgetSection, read_keys
from twostroke.cluster.core.errors import ConfigError, InvalidRequest
from twostroke.router.request import Continuation, GenerateRequest, ServedModel

log = structlog.get_logger(__name__)

FIELD = "continuation"
VERSION = 1
_HEAD = struct.Struct(">BBIQQQ8s16s")
"""version, bytes of an id, choice, seed, max_tokens, expiry (Unix seconds), model, binding."""
_MAC_BYTES = 16
_WIDTHS: dict[int, Literal["H", "I"]] = {2: "H", 4: "I"}
"""Type of array by bytes of an id; little-endian, as every supported platform is (`core.prefix` relies on it too)."""


class ContinuationTokens:
    """Seals with the first of its keys, and opens what was sealed with any: keys change one after the other."""

    def __init__(self, keys: Sequence[bytes], ttl_s: float, unix_time: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._ttl_s = ttl_s
        self._unix_time = unix_time

    @classmethod
    def of(cls, budget: BudgetSection) -> "ContinuationTokens":
        """May read the key's file. Raises ConfigError."""
        if budget.key:
            return cls(read_keys(budget.key.encode()), budget.ttl_s)
        if budget.key_file:
            try:
                return cls(read_keys(Path(budget.key_file).read_bytes()), budget.ttl_s)
            except OSError as error:
                raise ConfigError([f"router.budget.key_file: {budget.key_file}: {error.strerror}"]) from None
            except ValueError as error:
                raise ConfigError([f"router.budget.key_file: {budget.key_file}: {error}"]) from None
        if any((budget.output_tokens, budget.classes, budget.tenants)):
            log.warning("continuation_key_drawn", why="router.budget has neither key nor key_file: good here alone")
        return cls((secrets.token_bytes(32),), budget.ttl_s)

    def seal(self, continuation: Continuation) -> str:
        width = 2 if max(continuation.tokens, default=0) < 1 << 16 else 4
        head = _HEAD.pack(
            VERSION,
            width,
            continuation.choice,
            continuation.seed,
            continuation.max_tokens,
            int(self._unix_time() + self._ttl_s),
            continuation.model,
            continuation.binding,
        )
        ids = array(_WIDTHS[width], continuation.tokens)
        data = head + zlib.compress(ids.tobytes(), level=1)
        return base64.urlsafe_b64encode(data + _mac(self._keys[0], data)).decode()

    def open(self, text: str, max_context: int) -> Continuation:
        """Raises InvalidRequest for everything but what `seal` made with one of these keys, not too long ago."""
        if len(text) > longest(max_context):
            raise InvalidRequest(f"a continuation has at most {longest(max_context)} characters here", FIELD)
        try:
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except ValueError:
            raise InvalidRequest("the continuation is not one of ours: not base64url", FIELD) from None
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if len(body) < _HEAD.size or body[0] != VERSION or not self._is_ours(body, mac):
            raise InvalidRequest("the continuation is not one of ours, or was changed", FIELD)
        _, width, choice, seed, max_tokens, expires, model, binding = _HEAD.unpack_from(body)
        if expires < self._unix_time():
            raise InvalidRequest(f"the continuation has expired: they are good for {self._ttl_s:g} s", FIELD)
        ids = array(_WIDTHS[width], zlib.decompress(body[_HEAD.size :]))
        return Continuation(choice, seed, max_tokens, model, binding, tuple(ids))

    def _is_ours(self, data: bytes, mac: bytes) -> bool:
        return any(hmac.compare_digest(mac, _mac(key, data)) for key in self._keys)


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")[:_MAC_BYTES]


def longest(max_context: int) -> int:
    """Characters of a token for an answer that fills the context, and some."""
    return (_HEAD.size + 5 * max_context + 64) * 4 // 3


def under_budget(request: GenerateRequest, budget: int) -> GenerateRequest:
    """`request` with at most `budget` output tokens a part (0: as many as it asks), delivered ones aside."""
    sampling = request.sampling
    most = len(request.delivered) + budget
    if not budget or sampling.max_tokens <= most:
        return request
    return replace(request, sampling=replace(sampling, max_tokens=most))


def begin(
    request: GenerateRequest,
    model: ServedModel,
    budget: int,
    opened: Continuation | None,
    *,
    seed: int | None,
    max_tokens: int | None,
) -> GenerateRequest:
    """`request` under a budget of output tokens (0: none), from where `opened` stopped if it is a continuation.

    `seed` and `max_tokens` as the client asked: `request` has what was drawn or computed where they are None.
    Raises InvalidRequest naming the continuation when it is not of this model and this request.
    """
    if not budget and opened is None:
        return request
    sampling = request.sampling
    own = Continuation(
        choice=0,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        model=_model_digest(model),
        binding=_binding(request, seed, max_tokens),
    )
    if opened is not None:
        if opened.model != own.model:
            raise InvalidRequest("the continuation is of another model, or of other weights", FIELD)
        if opened.binding != own.binding:
            raise InvalidRequest(
                "the continuation is of another request; but for n, stream, timeout and priority all must be as it was",
                FIELD,
            )
        own = opened
        # The prompt was told of with the first part.
        sampling = replace(sampling, seed=own.seed, max_tokens=own.max_tokens, prompt_logprobs=None)
    num_choices = request.num_choices if opened is None else 1
    return under_budget(replace(request, sampling=sampling, num_choices=num_choices, continuation=own), budget)


def _model_digest(model: ServedModel) -> bytes:
    return blake2b(json.dumps([model.name, model.fingerprint]).encode(), digest_size=8).digest()


def _binding(request: GenerateRequest, seed: int | None, max_tokens: int | None) -> bytes:
    """Of what is not at its default, so that a new parameter does not end the tokens of the version before."""
    sampling = request.sampling
    values = {field.name: (getattr(sampling, field.name), field.default) for field in fields(sampling)}
    about: dict[str, object] = {name: value for name, (value, default) in values.items() if value != default}
    about |= {"seed": seed, "max_tokens": max_tokens, "stop": request.stop}
    about |= {"tenant": request.tenant, "salt": request.salt, "adapter": request.adapter}
    digest = blake2b(json.dumps(about, sort_keys=True, default=repr).encode(), digest_size=16)
    digest.update(array("I", request.prompt).tobytes())
    return digest.digest()
