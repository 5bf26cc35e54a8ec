"""Web applications on real servers, on free ports, in threads of their own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from werkzeug.serving import make_server

from tests.support import eventually

HOST = "127.0.0.1"
GIVE_UP_S = 20.0


@contextmanager
def serving_asgi(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application with uvicorn; the address."""
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), within_s=GIVE_UP_S)
        assert server.started
        yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(GIVE_UP_S)
        assert not thread.is_alive()


@contextmanager
def serving_wsgi(app: Callable[..., Any]) -> Iterator[str]:
    """Serve a WSGI application with werkzeug, a thread for each request; the address."""
    server = make_server(HOST, 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(GIVE_UP_S)
        server.server_close()
        assert not thread.is_alive()
