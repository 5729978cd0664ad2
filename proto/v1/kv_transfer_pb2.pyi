from twostroke.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgreeRequest(_message.Message):
    __slots__ = ("incarnation", "layout")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    layout: _common_pb2.PageLayout
    def __init__(self, incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.PageLayout, _Mapping]] = ...) -> None: ...

class AgreeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Writer(_message.Message):
    __slots__ = ("lease_id", "epoch", "nonce")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    epoch: int
    nonce: bytes
    def __init__(self, lease_id: _Optional[str] = ..., epoch: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("writer", "first", "checksums")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    first: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., first: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PushPart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitPages(_message.Message):
    __slots__ = ("writer", "num_pages", "first_token", "first_token_index", "first_logprob")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    num_pages: int
    first_token: int
    first_token_index: int
    first_logprob: _common_pb2.Logprobs
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., num_pages: _Optional[int] = ..., first_token: _Optional[int] = ..., first_token_index: _Optional[int] = ..., first_logprob: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortPages(_message.Message):
    __slots__ = ("writer", "reason")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    reason: str
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PairRequest(_message.Message):
    __slots__ = ("join", "offer", "done")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    join: PairJoin
    offer: PairOffer
    done: PairDone
    def __init__(self, join: _Optional[_Union[PairJoin, _Mapping]] = ..., offer: _Optional[_Union[PairOffer, _Mapping]] = ..., done: _Optional[_Union[PairDone, _Mapping]] = ...) -> None: ...

class PairReply(_message.Message):
    __slots__ = ("joined", "ready", "refused", "received")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    joined: PairJoined
    ready: PairReady
    refused: PairRefused
    received: PairReceived
    def __init__(self, joined: _Optional[_Union[PairJoined, _Mapping]] = ..., ready: _Optional[_Union[PairReady, _Mapping]] = ..., refused: _Optional[_Union[PairRefused, _Mapping]] = ..., received: _Optional[_Union[PairReceived, _Mapping]] = ...) -> None: ...

class PairJoin(_message.Message):
    __slots__ = ("sender", "incarnation", "layout", "device", "offer_bytes")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    sender: str
    incarnation: str
    layout: _common_pb2.PageLayout
    device: str
    offer_bytes: int
    def __init__(self, sender: _Optional[str] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.PageLayout, _Mapping]] = ..., device: _Optional[str] = ..., offer_bytes: _Optional[int] = ...) -> None: ...

class PairJoined(_message.Message):
    __slots__ = ("group", "store_port", "backend")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    group: str
    store_port: int
    backend: str
    def __init__(self, group: _Optional[str] = ..., store_port: _Optional[int] = ..., backend: _Optional[str] = ...) -> None: ...

class PairOffer(_message.Message):
    __slots__ = ("seq", "writer", "first", "count")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    writer: Writer
    first: int
    count: int
    def __init__(self, seq: _Optional[int] = ..., writer: _Optional[_Union[Writer, _Mapping]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class PairReady(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class PairRefused(_message.Message):
    __slots__ = ("seq", "reason")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seq: int
    reason: str
    def __init__(self, seq: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PairDone(_message.Message):
    __slots__ = ("seq", "checksums")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class PairReceived(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...
