"""Streamable HTTP: who may connect, with which token, and how large a request may be."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.errors import Finding, InputError, input_error

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 4 * 1024 * 1024
TOKEN_VARIABLE = "FLASHRT_TOKEN"
MIN_TOKEN_LENGTH = 16
PATH = "/mcp"


@dataclass(frozen=True)
class HttpOptions:
    """Where an HTTP server listens and whom it answers.

    Parameters
    ----------
    token
        What a request has to bring as ``Authorization: Bearer``; None: nothing is asked for.
    names
        Further names and addresses, with or without a port, under which clients reach it (their ``Host`` header).
    """

    host: str
    port: int
    token: str | None = None
    names: tuple[str, ...] = ()

    def allowed_hosts(self) -> list[str]:
        """Return the values of the ``Host`` header that are answered; ``:*`` stands for any port."""
        own = {self.host} if self.host not in {"0.0.0.0", "::"} else {socket.gethostname(), socket.getfqdn()}
        if is_loopback(self.host) or self.host in {"0.0.0.0", "::"}:
            own |= {"127.0.0.1", "localhost", "::1"}
        written = [f"[{name}]" if name.count(":") > 1 else name for name in sorted(own)]
        named = [name for name in self.names if ":" in name.strip("[]") and name[-1] != "]"]
        bare = [*written, *(name for name in self.names if name not in named)]
        return [*named, *bare, *(f"{name}:*" for name in bare)]


def http_options(
    address: str, *, allow_remote: bool = False, token_file: Path | None = None, names: tuple[str, ...] = ()
) -> HttpOptions:
    """Return the options of a server at ``HOST:PORT``.

    The token is what the file has, which is made with a new one where it is not there; else the environment's
    ``FLASHRT_TOKEN``.

    Raises
    ------
    InputError
        The address cannot be listened on, other machines would reach it unasked or without a token, or the token
        cannot be read or is too short to be none that is guessed.
    """
    host, port = split_address(address)
    token = _token(token_file)
    if not is_loopback(host):
        findings = []
        if not allow_remote:
            findings.append(
                Finding("option --http", "a host that only this machine reaches (127.0.0.1, ::1 or localhost): the "
                        "tools run code", f"'{address}'",
                        "listen on 127.0.0.1 and reach it through a tunnel (ssh -L), or add --allow-remote and a token",
                        rule="not-loopback")
            )  # fmt: skip
        if token is None:
            findings.append(
                Finding("option --http", "a token, where other machines reach the server", "none",
                        f"add --token-file FILE (made if it is not there), or set {TOKEN_VARIABLE}", rule="no-token")
            )  # fmt: skip
        if findings:
            raise InputError(findings)
    _require_free(host, port, address)
    return HttpOptions(host, port, token, names)


def _token(path: Path | None) -> str | None:
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE)
        where = f"environment variable {TOKEN_VARIABLE}"
    else:
        where = f"option --token-file '{path}'"
        try:
            if not path.exists():
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_urlsafe(32) + "\n")
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise input_error(
                where, "a file that can be read, or made", str(error), "name another one", rule="token"
            ) from None
    if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
        raise input_error(
            where, f"at least {MIN_TOKEN_LENGTH} printable ASCII characters", f"{len(token)} characters",
            "write a longer one, or name a file that is not there yet", rule="token",
        )  # fmt: skip
    return token


class BearerCheck:
    """Refuse requests without the token, before anything else of them is looked at."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                from starlette.responses import PlainTextResponse

                response = PlainTextResponse(
                    "expected 'Authorization: Bearer TOKEN' with the server's token\n", 401,
                    {"WWW-Authenticate": 'Bearer realm="flashrt"'},
                )  # fmt: skip
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def serve_http(server: MCPServer[Any], options: HttpOptions) -> None:
    """Serve until cancelled."""
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    hosts = options.allowed_hosts()
    security = TransportSecuritySettings(
        allowed_hosts=hosts, allowed_origins=[f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")]
    )
    app: ASGIApp = server.streamable_http_app(
        streamable_http_path=PATH, host=options.host, max_request_body_size=MAX_BODY_BYTES, transport_security=security
    )
    if options.token is not None:
        app = BearerCheck(app, options.token)
    await uvicorn.Server(uvicorn.Config(app, host=options.host, port=options.port, log_level="warning")).serve()


def _require_free(host: str, port: int, text: str) -> None:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise InputError(
            Finding("option --http", "an address of this machine that is free", f"'{text}' ({error})",
                    "choose another port, or end the server that has it")
        ) from None  # fmt: skip


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`; of names only ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises
    ------
    InputError
        It is no such address.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(
            Finding("option --http", "HOST:PORT, such as 127.0.0.1:8765", f"'{text}'", "correct it and start again")
        )
    return host.strip("[]") or "127.0.0.1", int(port)
