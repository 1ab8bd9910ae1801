"""`aqnpipe view`: pages for this user of this machine alone, which show every response of a study."""

import hmac
import http.server
import os
import secrets
import socket
import socketserver
import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from aqnpipe.errors import AqnpipeError, ConfigError, DataError

LOOPBACK = "127.0.0.1"
"""The only address served: responses may be confidential."""

_NEEDS_ADDRESS = "expected the address that aqnpipe view printed, with its token"

_READ_BY_ITS_OWNER = 0o177
"""Mask of the permissions of a socket file."""


def view(
    results: Annotated[Path, typer.Argument(help="results folder of a study")] = Path("results"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free one")] = 8719,
    unix_socket: Annotated[
        Path | None,
        typer.Option("--socket", help="serve on this Unix socket, which only you can open, in place of a port"),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            help="scorer that decides which responses are right; `own`: the study's function; default: the study's"
        ),
    ] = None,
    language: Annotated[Literal["en", "zh"], typer.Option(help="language of the pages")] = "en",
) -> None:
    """Show every response of a study side by side, with a search, in a browser on this machine.

    Serves pages on 127.0.0.1 until Ctrl-C, to whoever has the token in the printed address; nothing is written, and no
    other machine can reach them. From another machine, forward the port: ssh -L 8719:127.0.0.1:8719 HOST, or the
    socket: ssh -L 8719:PATH HOST.
    """
    server = open_server(results, unix_socket or port, scorer, language)
    where = f"{unix_socket}, forwarded as" if unix_socket else "at"
    port = port if unix_socket else server.server_address[1]
    try:
        typer.echo(f"view: {where} http://{LOOPBACK}:{port}/?token={server.token} (Ctrl-C ends it)")
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("view: ended")
    finally:
        server.server_close()


class ViewServer(http.server.ThreadingHTTPServer):
    """Serves on a port of 127.0.0.1, or on a Unix socket. Requests need `token`: other users reach the port too."""

    request_queue_size = 128

    def __init__(self, address: int | Path, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.token = secrets.token_urlsafe(24)
        self._made: Path | None = None
        if isinstance(address, Path):
            self.address_family = socket.AF_UNIX
            super().__init__(str(address), handler)  # type: ignore[arg-type]
        else:
            super().__init__((LOOPBACK, address), handler)

    def server_bind(self) -> None:
        """Bind the socket; of a Unix socket there is no name of a host."""
        if self.address_family != socket.AF_UNIX:
            super().server_bind()
            return
        _remove_if_nobody_listens(Path(str(self.server_address)))
        before = os.umask(_READ_BY_ITS_OWNER)
        try:
            socketserver.TCPServer.server_bind(self)
        finally:
            os.umask(before)
        self._made = Path(str(self.server_address))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a bug; a browser may leave before it has its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Close the socket and remove its file; one that was there before is not touched."""
        super().server_close()
        if self._made is not None:
            self._made.unlink(missing_ok=True)


def _remove_if_nobody_listens(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        try:
            tried.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def open_server(results: Path, address: int | Path, scorer: str | None, language: Literal["en", "zh"]) -> ViewServer:
    """Return a server of the pages of `results`, not yet serving; ConfigError or DataError for a user's mistake.

    `address`: a port on 127.0.0.1 (0: any free one), or the path of a Unix socket.
    """
    from aqnpipe.report.responses import ResponsePages, Responses
    from aqnpipe.report.words import load_words

    try:
        is_folder = results.is_dir()
    except OSError as error:
        raise ConfigError(f"{results}: cannot be read ({error.strerror})") from error
    if not is_folder:
        raise ConfigError(f"{results}: no such folder, expected the results folder of a study")
    responses = Responses(results)
    chosen = scorer or responses.primary_scorer
    if chosen not in responses.scorers:
        raise ConfigError(f"--scorer: the evaluations have no {chosen}, expected {', '.join(responses.scorers)}")
    pages = ResponsePages(responses, load_words(language, responses.noise_names()), chosen)
    handler = type("Handler", (_Handler,), {"pages": pages, "report": results / "report.html"})
    try:
        return ViewServer(address, handler)
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(address, Path):
            raise ConfigError(f"--socket: {address} cannot be used ({why}), expected the path of a new file") from error
        raise ConfigError(f"--port: {address} cannot be used ({why}), expected a free port; 0 takes any") from error


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET requests that name this machine and have the token.

    By another name a page of the web could read the responses, without the token other users of the machine. The
    address that `view` prints has it; the first answer keeps it as a cookie.
    """

    server: ViewServer
    # Of an idle connection, which keeps a thread.
    timeout = 60
    pages: Any
    report: Path
    server_version, sys_version = "aqnpipe", ""

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self._answer(421, f"{_NEEDS_ADDRESS}; forward it from the same port\n", "text/plain; charset=utf-8")
            return
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
        except ValueError:
            self._answer(400, f"{_NEEDS_ADDRESS}\n", "text/plain; charset=utf-8")
            return
        if self._is_token(query.get("token", [""])[0]):
            cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(303, "", "text/plain; charset=utf-8", Location=address.path, **{"Set-Cookie": cookie})
            return
        if not self._is_token(self._token_of_cookie()):
            self._answer(403, f"{_NEEDS_ADDRESS}\n", "text/plain; charset=utf-8")
            return
        # A results folder may come from elsewhere: no link in it shows another file.
        if address.path == "/report.html" and self.report.is_file() and not self.report.is_symlink():
            # The report has a policy of its own.
            page = self.report.read_text(encoding="utf-8", errors="replace")
            self._answer(200, page, "text/html; charset=utf-8", policy="")
            return
        try:
            body, status = self.pages.page(unquote(address.path), query), 200
        except DataError as error:
            body, status = self.pages.message(str(error)), 404
        except AqnpipeError as error:
            body, status = self.pages.message(str(error)), 500
        policy = f"default-src 'none'; style-src 'sha256-{self.pages.style_hash}'; form-action 'self'; base-uri 'none'"
        self._answer(status, body, "text/html; charset=utf-8", policy)

    def _names_this_machine(self) -> bool:
        host, _, port = self.headers.get("Host", "").partition(":")
        # A socket is forwarded from a port of another machine, which this one does not know.
        own = (port,) if self.server.address_family == socket.AF_UNIX else (str(self.server.server_address[1]),)
        return host in (LOOPBACK, "localhost") and port in own

    def _is_token(self, found: str) -> bool:
        return hmac.compare_digest(found.encode("utf-8", "replace"), self.server.token.encode())

    @property
    def _cookie_name(self) -> str:
        # Browsers send cookies to all ports of a machine.
        return f"aqnpipe-view-{self.headers.get('Host', '').partition(':')[2]}"

    def _token_of_cookie(self) -> str:
        # One by one: a browser sends those of all programs on this machine, and some are not as the standard says.
        cookies = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        return next((value for name, _, value in cookies if name == self._cookie_name), "")

    def _answer(self, status: int, body: str, kind: str, policy: str = "default-src 'none'", **headers: str) -> None:
        content = body.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        for name, value in {**({"Content-Security-Policy": policy} if policy else {}), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing: a line per request would bury the address."""
