"""Policies as the store keeps them, and what to do when it has lost them."""
