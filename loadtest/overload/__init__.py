"""Overload experiments on a real backend: real processes, real HTTP, real CPU."""
