"""A Hub on loopback that speaks the routes which huggingface_hub 2.4 uses to publish, find and fetch models.

Files are kept as the Hub keeps them: small ones as git blobs in commits, `.safetensors` by their SHA-256 in a store of
large files, which answers under another host name (`localhost`), as the Hub's does. It does not speak Xet, which the
tests turn off.
"""

import hashlib
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

from loopback_repos import File, Repo, is_large
from loopback_routes import Handler


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" matches `pattern`.

    `act` gets the handler and says whether it has answered; None breaks the connection.
    """

    pattern: str
    act: Callable[["Handler"], bool] | None
    times: int


class LoopbackHub:
    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # the large-file store, by SHA-256
        self.collections: dict[str, list[str]] = {}
        self.requests: list[str] = []  # "METHOD path?query", in order
        self.store_headers: list[dict[str, str]] = []  # what the large-file store was sent
        self.faults: list[Fault] = []
        self.connections: list[socket.socket] = []
        self.page = 1000  # models in one page of a list
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.store_url = f"http://localhost:{self.server.server_port}/store"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:  # those that were kept alive would still be answered
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, name: str, folder: Path, **settings) -> Repo:
        """A repo that is there already, with the files of a folder."""
        repo = self.repos.setdefault(name, Repo(name, **settings))
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        repo.commit({name: self.file(path.read_bytes(), is_large(name)) for name, path in files.items()})
        return repo

    def file(self, content: bytes, large: bool) -> File:
        if large:
            self.objects[hashlib.sha256(content).hexdigest()] = content
        return File(content, large)

    def fail(self, pattern: str, act: Callable | None = None, times: int = 1) -> None:
        self.faults.append(Fault(pattern, act, times))

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)


def answer(status: int, error: str = "", **headers: str) -> Callable[[Handler], bool]:
    """A fault that answers with a status; `X_Error_Code` and the like become headers."""

    def act(handler: Handler) -> bool:
        handler.body()
        handler.reply(status, {"error": error}, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return act


def cut_after(size: int) -> Callable[[Handler], bool]:
    """A fault that breaks the connection after `size` bytes of what the route would send."""

    def act(handler: Handler) -> bool:
        whole = handler.reply

        def reply(status: int, content, headers=None) -> None:
            handler.reply = whole
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(content[:size])
            handler.wfile.flush()
            handler.break_connection()

        handler.reply = reply
        return False

    return act
