"""Connections: the fast lane, guarded protocols, size and time limits, draining, request ids, tracing and logs."""
