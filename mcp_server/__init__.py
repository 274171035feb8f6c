"""The MCP surface: the server, its tools and jobs, the command line, and the demonstration."""
