"""The HTTP API of Headgate."""
