"""A server of tools that speaks MCP over stdin and stdout."""

from mcp.server import MCPServer

server = MCPServer("words")


@server.tool()
def count_letters(word: str, letter: str) -> int:
    """Count how often a letter occurs in a word."""
    return word.count(letter)


if __name__ == "__main__":
    server.run()
