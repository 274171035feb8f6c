"""``python -m flashrt.mcp_server``: the same as the ``flashrt`` command."""

import sys

from flashrt.mcp_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
