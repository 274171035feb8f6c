"""Print the MCP servers that Codex connects to with their tools, and the skills of this folder; wants no account."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any


def main() -> None:
    """Ask and print one line a server, and one with the skills."""
    process = subprocess.Popen(
        ["codex", "app-server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def send(message: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    def answer(number: int) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if message.get("id") == number:
                return message["result"]
        raise SystemExit("codex app-server ended before it answered")

    try:
        send({"id": 1, "method": "initialize", "params": {"clientInfo": {"name": "flashrt", "version": "0"}}})
        answer(1)
        send({"method": "initialized"})
        send({"id": 2, "method": "mcpServerStatus/list", "params": {}})
        for server in answer(2)["data"]:
            print(f"{server['name']}: {len(server['tools'])} tools: {' '.join(sorted(server['tools']))}")
        send({"id": 3, "method": "skills/list", "params": {"cwds": [os.getcwd()]}})
        found = [skill["name"] for entry in answer(3)["data"] for skill in entry["skills"]]
        print(f"skills: {' '.join(sorted(found))}")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
