"""``flashrt dashboard``: the live page over HTTP and in a real browser, who may ask, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from flashrt.mcp_server.jobs import read_job, start_job
from flashrt.variants import VariantQueue, open_store
from tests.conftest import wait_until
from tests.server import browser

EVIL = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"


class Page:
    """A dashboard that runs in a process of its own."""

    def __init__(self, workspace: Path, *more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flashrt.mcp_server", "dashboard", "--no-open", "--workspace", str(workspace),
             *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        assert found, said
        self.port = int(found[1])
        self.address = found[0]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Mapping[str, str]]:
        """Return status, body and headers of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())

    def end(self, with_signal: int) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(with_signal)
        return self.process.wait(60)


@contextlib.contextmanager
def dashboard(workspace: Path, *more: str) -> Iterator[Page]:
    page = Page(workspace, *more)
    try:
        yield page
    finally:
        if page.process.poll() is None:
            page.end(signal.SIGTERM)
        for stream in (page.process.stdout, page.process.stderr):
            assert stream is not None
            stream.close()


def hanging_job(workspace: Path) -> str:
    """Start a job that goes on until it is cancelled, and return its id once its system runs."""
    job = start_job(
        workspace, "equivalence_check",
        {"baseline": "reference.py:serve", "candidate": "gated.py:family", "inputs": "inputs.py:batches", "count": 2},
    )  # fmt: skip
    wait_until((workspace / "family").exists, "the system runs")
    return job


def gone(workspace: Path) -> None:
    for pid in map(int, (workspace / "family").read_text().split()):
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), f"process {pid} is gone")  # type: ignore[misc]


def test_it_answers_its_own_pages_alone_and_cancels_for_its_token_alone(workspace: Path) -> None:
    with dashboard(workspace) as page:
        status, text, headers = page.ask("/")
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert not (workspace / ".flashrt").exists(), "looking makes nothing"
        for host in ("example.org", f"example.org:{page.port}", "127.0.0.1:1"):
            assert page.ask("/look", Host=host)[0] == 421
        assert page.ask("/look", Origin="http://example.org")[0] == 403
        assert page.ask("/look", Origin=f"http://localhost:{page.port}")[0] == 200
        job = hanging_job(workspace)
        (shown,) = json.loads(page.ask("/look")[1])["jobs"]
        assert (shown["job"], shown["state"], shown["live"]) == (job, "running", True)
        token = re.search(r'name="flashrt-token" content="([^"]+)"', text)
        assert token is not None
        assert page.ask(f"/jobs/{job}/cancel")[0] == 405
        for wrong in ({}, {"X_FlashRT_Token": "guess"}):
            assert page.ask(f"/jobs/{job}/cancel", "POST", **wrong)[0] == 403
        foreign = {"X_FlashRT_Token": token[1], "Origin": "http://example.org"}
        assert page.ask(f"/jobs/{job}/cancel", "POST", **foreign)[0] == 403
        assert read_job(workspace, job).state == "running"
        status, text, _ = page.ask(f"/jobs/{job}/cancel", "POST", X_FlashRT_Token=token[1])
        assert (status, json.loads(text)["state"]) == (200, "cancelled")
        gone(workspace)
        status, text, _ = page.ask(f"/jobs/{job}/cancel", "POST", X_FlashRT_Token=token[1])
        assert status == 409
        assert "there is nothing to cancel" in text
        status, text, _ = page.ask("/report/run-unknown")
        assert status == 404
        assert "bench_run" in text
        assert "Nothing was built or measured" in page.ask("/report")[1]


def test_it_ends_at_once_while_a_stream_of_events_is_open(workspace: Path) -> None:
    for with_signal, expected in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        with dashboard(workspace) as page:
            connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", "/events")
                answer = connection.getresponse()
                line = answer.readline().decode()
                assert set(json.loads(line.removeprefix("data: "))) == {"jobs", "devices", "queue", "runs"}
                assert page.end(with_signal) == expected
            assert page.process.stderr is not None
            assert "Traceback" not in page.process.stderr.read()


def test_a_port_that_is_taken_is_refused(workspace: Path) -> None:
    with dashboard(workspace) as page:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "flashrt.mcp_server", "dashboard", "--no-open", "--port", str(page.port),
             "--workspace", str(workspace)], capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert "a free port of 127.0.0.1" in done.stderr


def test_the_page_shows_what_happens_and_cancels_in_a_browser(workspace: Path, tmp_path: Path) -> None:
    queue = VariantQueue(open_store(workspace))
    queue.add(EVIL, "stream", "the path", "no state", system="variants.py:honest_chunks")
    program = browser.find()
    with dashboard(workspace) as page:
        if program is None:
            print("no Chromium on this machine: the page is looked at over HTTP alone")
            look_over_http(page, workspace)
            return
        with browser.Browser(program, tmp_path / "chromium") as tab:
            look_in_browser(tab, page, workspace)


def look_over_http(page: Page, workspace: Path) -> None:
    text = page.ask("/")[1]
    assert EVIL not in text
    assert "onerror" not in re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    job = hanging_job(workspace)
    assert job in page.ask("/look")[1]
    token = re.search(r'name="flashrt-token" content="([^"]+)"', text)
    assert token is not None
    assert page.ask(f"/jobs/{job}/cancel", "POST", X_FlashRT_Token=token[1])[0] == 200
    gone(workspace)


def look_in_browser(tab: browser.Browser, page: Page, workspace: Path) -> None:
    tab.open(page.address)
    tab.until("document.getElementById('state').textContent === 'live'")
    tab.until("document.querySelector('#queue tbody').innerText.includes('stream')")
    assert EVIL in tab.value("document.getElementById('queue').innerText"), "shown as the text that it is"
    assert tab.value("document.title") == "FlashRT dashboard"
    assert "not stop yet" in tab.value("document.getElementById('stop').innerText")
    job = hanging_job(workspace)
    tab.until(f"document.querySelector('button[data-job=\"{job}\"]')")
    tab.value(f"document.querySelector('button[data-job=\"{job}\"]').focus()")
    tab.until(f"document.activeElement?.dataset.job === '{job}'")
    tab.send(
        "Input.dispatchKeyEvent", type="rawKeyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
    )
    tab.send("Input.dispatchKeyEvent", type="char", key="Enter", text="\r")
    tab.send("Input.dispatchKeyEvent", type="keyUp", key="Enter", code="Enter", windowsVirtualKeyCode=13)
    tab.until("document.getElementById('jobs').innerText.includes('cancelled')")
    gone(workspace)
    colours = {}
    for theme in ("dark", "light"):
        tab.theme(theme)
        colours[theme] = tab.value("getComputedStyle(document.body).backgroundColor")
    assert colours == {"dark": "rgb(15, 19, 24)", "light": "rgb(255, 255, 255)"}
    tab.open(f"{page.address}report")
    assert tab.value("document.title").endswith("FlashRT report")
    assert {one for one in tab.requests if not one.startswith((page.address, "about:", "data:"))} == set()
    page.end(signal.SIGTERM)
