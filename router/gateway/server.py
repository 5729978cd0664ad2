"""The HTTP server that an app runs in, and the socket it listens on."""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_S = 620
"""An idle connection is the client's to close. A server that closes first resets the request that is just on its way,
which a client may not send again; so this is longer than any usual pool or load balancer in front keeps one (60 s on
AWS, 600 s on Google Cloud; uvicorn's own default is 5 s).
"""


def http_server(app: ASGIApp, close_s: int) -> uvicorn.Server:
    """`close_s`: what answers have to end when it is told to exit."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # nobody asks for the client's address
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=close_s,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the port is taken. Accepted sockets inherit no delay of small writes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(_HeadsWithBodies(transport))


class _HeadsWithBodies(asyncio.Transport):
    """Sends an answer's head with the first of its body: a send less, and the client wakes once.

    uvicorn writes a head as soon as it is told of it. Here one waits for what is written next, or for the end of this
    turn of the loop (HEAD has no body).
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data[:9] == b"HTTP/1.1 ":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
