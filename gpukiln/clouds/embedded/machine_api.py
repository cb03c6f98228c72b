"""The API in a machine's network, next to its metadata service; only the keys of its role are valid."""

from collections.abc import Callable, Iterable
from socket import socket
from threading import Thread
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from gpukiln.clouds.embedded.network import API_PORT, INSTANCE, METADATA

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


class MachineApi:
    """The API server for one machine.

    Args:
        listener: A listening socket in the machine's network namespace; this class closes it.
        application: WSGI application.
        instance_id: The machine whose role's keys are accepted.
    """

    def __init__(self, listener: socket, application: Application, instance_id: str) -> None:
        def of_machine(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            return application({**environ, INSTANCE: instance_id}, start_response)

        # werkzeug duplicates the descriptor (socket.fromfd), so this one is closed.
        with listener:
            self._server = make_server(
                METADATA,
                API_PORT,
                of_machine,
                threaded=True,
                request_handler=MotoRequestHandler,
                fd=listener.fileno(),
            )
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
