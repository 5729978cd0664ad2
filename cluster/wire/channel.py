"""How every gRPC channel and server of the cluster is set up. The only place with gRPC options.

Both ends agree on keepalive: a client pings every 20 s, also without calls, and gives up after 5 s; the server
permits that and does the same (FIELD-REPORTS F3: a server that does not answers with GOAWAY too_many_pings).
However many pings come, and however close together, none ends a connection: gRPC sends some of its own to measure
the bandwidth, and those that waited while one of the processes stood still come all at once.
Both ends agree on sizes: what we send stays under 1 MiB, what we accept is wider (F4).
"""

import grpc
import grpc.aio

RECEIVE_BYTES = 8 << 20
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 5_000

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", RECEIVE_BYTES),
    ("grpc.max_receive_message_length", RECEIVE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLIENT: list[tuple[str, int]] = [
    *_COMMON,
    # Peers are given by address; a proxy from the environment would see every page.
    ("grpc.enable_http_proxy", 0),
    # A subchannel shared between channels would outlive the close of one of them.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_SERVER: list[tuple[str, int]] = [
    *_COMMON,
    # 0: any number of pings that come too soon. The interval itself would then mean nothing.
    ("grpc.http2.max_ping_strikes", 0),
    # Two workers that want one port must not share it silently.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`; nothing is sent before the first call. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=_CLIENT)


def new_server() -> grpc.aio.Server:
    """A server with the cluster's options, without services or ports."""
    return grpc.aio.server(options=_SERVER)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listen on host:port (0: any free one) and return the port. Raises OSError when it is taken."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None
    if bound == 0:
        raise OSError(f"cannot listen on {host}:{port}")
    return bound
