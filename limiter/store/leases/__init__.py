"""Leases in the store: their rows, requests for them, and the list of them."""
