"""Decisions of a node without its store, and the memories that they need."""
