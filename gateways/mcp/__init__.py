"""The MCP gateway: services as tools of agents (docs/how-to/agents.md), on the official SDK `mcp`."""
