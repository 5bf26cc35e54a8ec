"""Parts that connect the client with servers and HTTP clients of others."""
