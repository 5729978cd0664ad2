"""The HTTP server that an app runs in, and the socket it listens on."""

import socket

import uvicorn
from starlette.types import ASGIApp

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
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # nobody asks for the client's address
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
