"""`aqnpipe view`: a page on this machine alone that shows every response of a study."""

import http.server
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from aqnpipe.errors import AqnpipeError, ConfigError, DataError

LOOPBACK = "127.0.0.1"
"""The only address served: responses may be confidential, and there is no password."""


def view(
    results: Annotated[Path, typer.Argument(help="results folder of a study")] = Path("results"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: any free one")] = 8719,
    scorer: Annotated[
        str | None,
        typer.Option(
            help="scorer that decides which responses are right; own: the study's own function; default: the study's"
        ),
    ] = None,
    language: Annotated[Literal["en", "zh"], typer.Option(help="language of the pages")] = "en",
) -> None:
    """Show every response of a study side by side, with a search, in a browser on this machine.

    Serves pages on 127.0.0.1 until Ctrl-C; nothing is written, and no other machine can reach them. From another
    machine, forward the port: ssh -L 8719:127.0.0.1:8719 HOST.
    """
    server = open_server(results, port, scorer, language)
    typer.echo(f"view: http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("view: ended")
    finally:
        server.server_close()


def open_server(
    results: Path, port: int, scorer: str | None, language: Literal["en", "zh"]
) -> http.server.ThreadingHTTPServer:
    """Return a server of the pages of `results`, not yet serving; ConfigError or DataError for a user's mistake."""
    from aqnpipe.report.responses import Responses
    from aqnpipe.report.responses_page import ResponsePages
    from aqnpipe.report.words import load_words

    if not results.is_dir():
        raise ConfigError(f"{results}: no such folder, expected the results folder of a study")
    responses = Responses(results)
    chosen = scorer or responses.primary_scorer
    if chosen not in responses.scorers:
        raise ConfigError(f"--scorer: the evaluations have no {chosen}, expected {', '.join(responses.scorers)}")
    pages = ResponsePages(responses, load_words(language, responses.noise_names()), chosen)
    handler = type("Handler", (_Handler,), {"pages": pages, "report": results / "report.html"})
    try:
        return http.server.ThreadingHTTPServer((LOOPBACK, port), handler)
    except OSError as error:
        raise ConfigError(
            f"--port: {port} cannot be used ({error.strerror}), expected a free port; 0 takes any"
        ) from error


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET requests that name this machine: a page of the web cannot read the responses by another name."""

    pages: Any
    report: Path
    server_version, sys_version = "aqnpipe", ""

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self._answer(421, "this server answers to 127.0.0.1 and localhost alone\n", "text/plain; charset=utf-8")
            return
        address = urlsplit(self.path)
        if address.path == "/report.html" and self.report.is_file():
            # The report has a policy of its own.
            self._answer(200, self.report.read_text(encoding="utf-8"), "text/html; charset=utf-8", policy="")
            return
        try:
            body, status = self.pages.page(unquote(address.path), parse_qs(address.query)), 200
        except DataError as error:
            body, status = self.pages.message(str(error)), 404
        except AqnpipeError as error:
            body, status = self.pages.message(str(error)), 500
        policy = f"default-src 'none'; style-src 'sha256-{self.pages.style_hash}'; form-action 'self'; base-uri 'none'"
        self._answer(status, body, "text/html; charset=utf-8", policy)

    def _names_this_machine(self) -> bool:
        port = self.server.server_address[1]  # type: ignore[index]
        return self.headers.get("Host", "") in (f"{LOOPBACK}:{port}", f"localhost:{port}")

    def _answer(self, status: int, body: str, kind: str, policy: str = "default-src 'none'") -> None:
        content = body.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if policy:
            self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write nothing: a line per request would bury the address."""
