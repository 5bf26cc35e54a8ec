"""Leases: parts of limits, on which a client decides by itself."""
