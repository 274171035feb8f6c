"""How long the server takes from its start to an answered tools/list, against a bare server of the same SDK.

Prints the ratio of medians; the two are started in turn, so that drift of the machine hits both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

BARE = """
from mcp.server import MCPServer
server = MCPServer("bare")
@server.tool()
def hello(name: str) -> str:
    return name
server.run("stdio")
"""
NUM_RUNS = 9
TARGET = 1.3


async def time_start_s(arguments: list[str]) -> float:
    """Return the seconds from starting a server to its answer to tools/list."""
    begin = time.monotonic()
    async with Client(stdio_client(StdioServerParameters(command=sys.executable, args=arguments))) as client:
        await client.list_tools()
        return time.monotonic() - begin


async def run() -> None:
    """Time both servers in turn and print medians and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE)
        ours = ["-P", "-m", "flashrt.mcp_server", "serve", "--workspace", folder]
        times: dict[str, list[float]] = {"bare": [], "flashrt": []}
        for _ in range(NUM_RUNS):
            times["bare"].append(await time_start_s([str(bare)]))
            times["flashrt"].append(await time_start_s(ours))
    bare_s, ours_s = statistics.median(times["bare"]), statistics.median(times["flashrt"])
    print(f"start to tools/list, median of {NUM_RUNS}: bare {bare_s * 1e3:.0f} ms, flashrt {ours_s * 1e3:.0f} ms")
    print(f"ratio {ours_s / bare_s:.2f} (target at most {TARGET})")


if __name__ == "__main__":
    anyio.run(run)
