"""Every failure that crosses a module border.

    TwostrokeError
    ├── InvalidRequest        the client must change the request; names the field      (not retryable)
    │   ├── ContextOverflow   prompt, or prompt + max_tokens, over a limit
    │   ├── UnknownModel
    │   └── BodyTooLarge
    ├── Overloaded            a bounded queue or pool is full; carries retry_after_s       (retryable)
    ├── Unavailable           no worker can serve this now                                 (retryable)
    ├── DeadlineExceeded      the request's own deadline passed                        (not retryable)
    ├── Cancelled             the client, or we for the client, gave the request up    (not retryable)
    ├── SlowReader            the client reads too slowly; its buffer is full          (not retryable)
    ├── PeerLost              a worker died, froze or broke its stream                     (retryable)
    ├── TransferFailed        pages did not arrive, or arrived wrong                       (retryable)
    ├── LayoutMismatch        two workers cannot exchange pages; names the field       (not retryable)
    ├── ConfigError           a configuration file with all of its mistakes            (not retryable)
    └── InternalError         our own invariant broke                                  (not retryable)

`code` is stable and goes over the wire; `cluster.wire.status` maps it to gRPC and HTTP in one table.
`retryable` says whether the dispatcher may continue the request elsewhere (or the client may come back).
"""

from typing import ClassVar


class TwostrokeError(Exception):
    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(TwostrokeError):
    """`field` is a path into the request body, for example `messages[1].content`."""

    code = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"


class Overloaded(TwostrokeError):
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(TwostrokeError):
    code = "unavailable"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TwostrokeError):
    code = "deadline_exceeded"


class Cancelled(TwostrokeError):
    code = "cancelled"


class SlowReader(TwostrokeError):
    code = "slow_reader"


class PeerLost(TwostrokeError):
    code = "peer_lost"
    retryable = True


class TransferFailed(TwostrokeError):
    code = "transfer_failed"
    retryable = True


class LayoutMismatch(TwostrokeError):
    """`field` is the first differing field of `PageLayout`; `ours` and `theirs` its two values."""

    code = "layout_mismatch"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"page layouts differ in {field}: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ConfigError(TwostrokeError):
    """All mistakes of one configuration, each as `path: what is wrong`."""

    code = "config"

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("invalid configuration:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))
        self.mistakes = mistakes


class InternalError(TwostrokeError):
    code = "internal"
