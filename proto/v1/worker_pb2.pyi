from twostroke.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Stroke(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STROKE_UNSPECIFIED: _ClassVar[Stroke]
    STROKE_RESERVE: _ClassVar[Stroke]
    STROKE_PREFILL: _ClassVar[Stroke]
    STROKE_LOCAL: _ClassVar[Stroke]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_PAGES: _ClassVar[RefusalReason]
    REFUSAL_REASON_QUEUE_FULL: _ClassVar[RefusalReason]
    REFUSAL_REASON_DRAINING: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_LARGE: _ClassVar[RefusalReason]
    REFUSAL_REASON_LAYOUT: _ClassVar[RefusalReason]
    REFUSAL_REASON_WRONG_ROLE: _ClassVar[RefusalReason]
    REFUSAL_REASON_BAD_SUBMIT: _ClassVar[RefusalReason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_FINISHED: _ClassVar[Outcome]
    OUTCOME_HANDED_OVER: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_EXPIRED: _ClassVar[Outcome]
    OUTCOME_PREEMPTED: _ClassVar[Outcome]
    OUTCOME_TRANSFER_FAILED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_BROKEN_GRAMMAR: _ClassVar[Outcome]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
STROKE_UNSPECIFIED: Stroke
STROKE_RESERVE: Stroke
STROKE_PREFILL: Stroke
STROKE_LOCAL: Stroke
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_NO_PAGES: RefusalReason
REFUSAL_REASON_QUEUE_FULL: RefusalReason
REFUSAL_REASON_DRAINING: RefusalReason
REFUSAL_REASON_TOO_LARGE: RefusalReason
REFUSAL_REASON_LAYOUT: RefusalReason
REFUSAL_REASON_WRONG_ROLE: RefusalReason
REFUSAL_REASON_BAD_SUBMIT: RefusalReason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_FINISHED: Outcome
OUTCOME_HANDED_OVER: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_EXPIRED: Outcome
OUTCOME_PREEMPTED: Outcome
OUTCOME_TRANSFER_FAILED: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_BROKEN_GRAMMAR: Outcome

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model", "layout", "num_pages", "max_context", "chunk_tokens", "transports", "device", "weight_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    address: str
    model: str
    layout: _common_pb2.PageLayout
    num_pages: int
    max_context: int
    chunk_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    device: str
    weight_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.PageLayout, _Mapping]] = ..., num_pages: _Optional[int] = ..., max_context: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("hello", "items", "fragment", "fragment_end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_END_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    items: _containers.RepeatedCompositeFieldContainer[RouterItem]
    fragment: bytes
    fragment_end: bool
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., items: _Optional[_Iterable[_Union[RouterItem, _Mapping]]] = ..., fragment: _Optional[bytes] = ..., fragment_end: _Optional[bool] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("hello", "items", "fragment", "fragment_end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_END_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    items: _containers.RepeatedCompositeFieldContainer[WorkerItem]
    fragment: bytes
    fragment_end: bool
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., items: _Optional[_Iterable[_Union[WorkerItem, _Mapping]]] = ..., fragment: _Optional[bytes] = ..., fragment_end: _Optional[bool] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class RouterItem(_message.Message):
    __slots__ = ("submit", "cancel", "renew_lease")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    renew_lease: RenewLease
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., renew_lease: _Optional[_Union[RenewLease, _Mapping]] = ...) -> None: ...

class WorkerItem(_message.Message):
    __slots__ = ("leased", "refused", "tokens", "started", "ended", "load", "prompt_logprobs")
    LEASED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    leased: Leased
    refused: Refused
    tokens: Tokens
    started: Started
    ended: Ended
    load: LoadReport
    prompt_logprobs: PromptRun
    def __init__(self, leased: _Optional[_Union[Leased, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptRun, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "job", "stroke", "prompt", "delivered", "sampling", "time_left_s", "salt", "adapter", "lease")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STROKE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    job: _common_pb2.JobId
    stroke: Stroke
    prompt: bytes
    delivered: bytes
    sampling: _common_pb2.SamplingParams
    time_left_s: float
    salt: str
    adapter: str
    lease: _common_pb2.Lease
    def __init__(self, handle: _Optional[int] = ..., job: _Optional[_Union[_common_pb2.JobId, _Mapping]] = ..., stroke: _Optional[_Union[Stroke, str]] = ..., prompt: _Optional[bytes] = ..., delivered: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., time_left_s: _Optional[float] = ..., salt: _Optional[str] = ..., adapter: _Optional[str] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ("handle", "bump_epoch")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BUMP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    bump_epoch: bool
    def __init__(self, handle: _Optional[int] = ..., bump_epoch: _Optional[bool] = ...) -> None: ...

class Leased(_message.Message):
    __slots__ = ("handle", "lease")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    lease: _common_pb2.Lease
    def __init__(self, handle: _Optional[int] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle", "reason", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: RefusalReason
    message: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("handle", "first_index", "count", "tokens", "logprobs", "with_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WITH_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: _containers.RepeatedScalarFieldContainer[int]
    first_index: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _common_pb2.Logprobs
    with_logprobs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[_Iterable[int]] = ..., first_index: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., with_logprobs: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptRun(_message.Message):
    __slots__ = ("handle", "first", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first: int
    logprobs: _common_pb2.Logprobs
    def __init__(self, handle: _Optional[int] = ..., first: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "cached_tokens", "first_token", "first_logprob")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    first_token: int
    first_logprob: _common_pb2.Logprobs
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., first_token: _Optional[int] = ..., first_logprob: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class JobTimings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_busy_s", "transfer_exposed_s", "decode_s", "cached_tokens", "computed_tokens", "pages_shipped", "bytes_shipped", "transport", "preemptions")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_busy_s: float
    transfer_exposed_s: float
    decode_s: float
    cached_tokens: int
    computed_tokens: int
    pages_shipped: int
    bytes_shipped: int
    transport: str
    preemptions: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_busy_s: _Optional[float] = ..., transfer_exposed_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., pages_shipped: _Optional[int] = ..., bytes_shipped: _Optional[int] = ..., transport: _Optional[str] = ..., preemptions: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("handle", "outcome", "finish_reason", "num_output", "message", "timings")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    outcome: Outcome
    finish_reason: _common_pb2.FinishReason
    num_output: int
    message: str
    timings: JobTimings
    def __init__(self, handle: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_output: _Optional[int] = ..., message: _Optional[str] = ..., timings: _Optional[_Union[JobTimings, _Mapping]] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("free", "cached", "active", "leased", "quarantined")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    active: int
    leased: int
    quarantined: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., active: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("ledger", "running", "waiting", "leases", "queued_tokens", "step_age_s", "num_steps", "event_sequence", "draining", "generated_tokens")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ledger: Ledger
    running: int
    waiting: int
    leases: int
    queued_tokens: int
    step_age_s: float
    num_steps: int
    event_sequence: int
    draining: bool
    generated_tokens: int
    def __init__(self, ledger: _Optional[_Union[Ledger, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., leases: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., step_age_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., event_sequence: _Optional[int] = ..., draining: _Optional[bool] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("incarnation", "sequence", "keys")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sequence: int
    keys: bytes
    def __init__(self, incarnation: _Optional[str] = ..., sequence: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("load", "fault", "transfers")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    load: LoadReport
    fault: str
    transfers: int
    def __init__(self, load: _Optional[_Union[LoadReport, _Mapping]] = ..., fault: _Optional[str] = ..., transfers: _Optional[int] = ...) -> None: ...
