"""``flashrt dashboard``: a live page of one workspace, for this machine alone: jobs, devices, the queue, runs."""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import secrets
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt.errors import FlashrtError, input_error
from flashrt.mcp_server.workspace import Workspace

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
EVERY_S = 1.0
GRACE_S = 2
"""For answers that are on their way when the page is ended."""
MAX_JOBS, MAX_RUNS = 30, 30
LOG_BYTES = 4000
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TOKEN_HEADER = "X-FlashRT-Token"
FOLDER = Path(__file__).parent


def look(workspace: Workspace) -> dict[str, Any]:
    """Return what the page shows, as JSON values; a part that cannot be read says why."""
    if not (workspace.root / ".flashrt" / "flashrt.db").is_file():
        # Looking makes nothing.
        queue = {"variants": [], "may_stop": False, "in_the_way": []}
        return {"jobs": [], "devices": _try(_devices), "queue": queue, "runs": []}
    return {
        "jobs": _try(partial(_jobs, workspace)),
        "devices": _try(_devices),
        "queue": _try(partial(_queue, workspace)),
        "runs": _try(partial(_runs, workspace)),
    }


def _try(read: Any) -> Any:
    try:
        return read()
    except (FlashrtError, OSError) as error:
        return {"error": str(error)}


def _jobs(workspace: Workspace) -> list[dict[str, Any]]:
    from flashrt.mcp_server.jobs import job_folder, list_jobs

    found = []
    for job in list_jobs(workspace.root)[:MAX_JOBS]:
        record = {key: getattr(job, key) for key in ("job", "tool", "state", "progress", "message", "error",
                                                      "started_at", "finished_at")}  # fmt: skip
        live = not job.is_final
        record["log"] = _tail(job_folder(workspace.root, job.job) / "log.txt") if live else job.log_tail
        record["live"] = live
        found.append(record)
    return found


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _devices() -> dict[str, Any]:
    from flashrt import gpu

    found = gpu.status()
    return {key: found[key] for key in ("devices", "leases", "waiting", "quarantined", "notes")}


def _queue(workspace: Workspace) -> dict[str, Any]:
    from flashrt.variants.queue import VariantQueue

    found = VariantQueue(workspace.store).list().as_dict()
    keys = ("variant", "state", "transformation", "hypothesis", "reason", "parent", "depth", "rank", "run")
    return {**found, "variants": [{key: one.get(key) for key in keys} for one in found["variants"]]}


def _runs(workspace: Workspace) -> list[dict[str, Any]]:
    found = []
    for record in list(reversed(workspace.store.list_records("run")))[:MAX_RUNS]:
        run = record.payload
        found.append(
            {
                "run": record.id,
                "system": (run.get("system") or {}).get("reference"),
                "scenario": run.get("scenario"),
                "valid": run.get("valid"),
                "emulated": run.get("emulated"),
                "fps": run.get("fps"),
                "period_ms": run.get("period_ms"),
                "latency_ms": (run.get("latency_ms") or {}).get("mean"),
                "first_output_ms": run.get("first_output_ms"),
            }
        )
    return found


class OwnPagesOnly:
    """Refuse requests that name another host, or come from another origin: a page elsewhere must not read this one."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.app = app
        self._hosts = {host.encode() for host in hosts}
        self._origins = {f"http://{host}".encode() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421 (host) or 403 (origin)."""
        if scope["type"] == "http":
            heads = dict(scope["headers"])
            origin = heads.get(b"origin")
            status = 421 if heads.get(b"host") not in self._hosts else 0
            status = status or (403 if origin is not None and origin not in self._origins else 0)
            if status:
                from starlette.responses import PlainTextResponse

                await PlainTextResponse("this page answers its own address alone\n", status)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Dashboard:
    """The page, its data, and the one thing that it can do: cancel a job."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.token = secrets.token_urlsafe(32)
        self.ended = False
        """Whether streams of events are to end, which they never do by themselves."""

    def application(self, port: int) -> ASGIApp:
        """Return the application, which answers under this port of the loopback address alone."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        made: Starlette = Starlette(
            routes=[
                Route("/", self.page),
                Route("/dashboard.js", self.script),
                Route("/look", self.look),
                Route("/events", self.events),
                Route("/report", self.report),
                Route("/report/{run}", self.report),
                Route("/jobs/{job}/cancel", self.cancel, methods=["POST"]),
            ]
        )
        return OwnPagesOnly(made, tuple(f"{name}:{port}" for name in (HOST, "localhost")))

    async def page(self, request: Request) -> Response:
        """Answer the page itself; it shows what there is before any script runs."""
        from starlette.responses import HTMLResponse

        from flashrt.variants.report.page import STYLE, environment

        found = await self._look()
        text = environment(FOLDER).get_template("dashboard.html").render(
            style=STYLE.read_text(encoding="utf-8"), token=self.token, workspace=str(self.workspace.root), look=found,
        )  # fmt: skip
        return HTMLResponse(text, headers=HEADERS)

    async def script(self, request: Request) -> Response:
        """Answer the page's script."""
        from starlette.responses import Response

        text = (FOLDER / "dashboard.js").read_text(encoding="utf-8")
        return Response(text, media_type="text/javascript", headers=HEADERS)

    async def look(self, request: Request) -> Response:
        """Answer what is shown, as JSON."""
        from starlette.responses import JSONResponse

        return JSONResponse(json.loads(json.dumps(await self._look(), default=str)), headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Answer what is shown whenever it has changed, as server-sent events."""
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._changes(request), media_type="text/event-stream", headers=HEADERS)

    async def _changes(self, request: Request) -> AsyncIterator[str]:
        import anyio

        said = ""
        while not self.ended and not await request.is_disconnected():
            now = json.dumps(await self._look(), default=str)
            yield f"data: {now}\n\n" if now != said else ": nothing new\n\n"
            said = now
            until = anyio.current_time() + EVERY_S
            while not self.ended and anyio.current_time() < until:
                await anyio.sleep(EVERY_S / 10)

    async def _look(self) -> dict[str, Any]:
        import anyio

        return await anyio.to_thread.run_sync(look, self.workspace)

    async def report(self, request: Request) -> Response:
        """Answer the report of the workspace, or of one run; nothing is written."""
        import anyio
        from starlette.responses import HTMLResponse, PlainTextResponse

        from flashrt.mcp_server.reporting import gather
        from flashrt.variants.report import render_report

        run = request.path_params.get("run")

        def make() -> str:
            title = f"{run}: FlashRT report" if run else None
            return render_report(gather(self.workspace, [run] if run else None, None, title))

        try:
            return HTMLResponse(await anyio.to_thread.run_sync(make), headers={"Cache-Control": "no-store"})
        except FlashrtError as error:
            return PlainTextResponse(f"{error}\n", 404)

    async def cancel(self, request: Request) -> Response:
        """Cancel a job for whoever has the page's token."""
        import anyio
        from starlette.responses import JSONResponse

        from flashrt.mcp_server.jobs import cancel_job

        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return JSONResponse({"error": "this needs the token of the page; load it again"}, 403)
        try:
            job = await anyio.to_thread.run_sync(cancel_job, self.workspace.root, request.path_params["job"])
        except FlashrtError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({"job": job.job, "state": job.state})


def run_dashboard(options: argparse.Namespace) -> int:
    """Serve the page until SIGTERM or Ctrl-C; return the exit status.

    Raises
    ------
    InputError
        The workspace is no folder, or the port is taken.
    """
    import socket

    workspace = Workspace(options.workspace)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, options.port))
            listener.listen()
        except (OSError, OverflowError) as error:
            raise input_error(
                "option --port", f"a free port of {HOST}", f"{options.port} ({error})",
                "choose another, or leave it out for a free one", rule="no-port",
            ) from None  # fmt: skip
        port = listener.getsockname()[1]
        address = f"http://{HOST}:{port}/"
        print(f"dashboard of {workspace.root}: {address} (Ctrl-C ends it)", flush=True)
        if not options.no_open and sys.stdout.isatty():
            webbrowser.open(address)
        return _serve(Dashboard(workspace), port, listener)


def _serve(dashboard: Dashboard, port: int, listener: Any) -> int:
    import uvicorn

    ended: list[int] = []

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # What is cut off now is no error; a second signal waits for nothing.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.force_exit = bool(ended)
            ended.append(sig)
            dashboard.ended = self.should_exit = True

    config = uvicorn.Config(
        dashboard.application(port), log_level="warning", timeout_graceful_shutdown=GRACE_S, lifespan="off"
    )
    try:
        Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        ended.append(signal.SIGINT)
    return 130 if signal.SIGINT in ended else 0
