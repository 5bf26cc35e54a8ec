"""Policies in the store, and the handling of their loss."""
