"""The data plane: decode, decide, render; no connection and no store."""
