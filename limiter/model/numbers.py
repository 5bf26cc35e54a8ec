"""Bounds of numbers, wherever they come from."""

from __future__ import annotations

NUMBER_MAX = 2.0**53
"""The largest number that float64, Lua and JSON hold to the unit."""

LEAST = 1e-9
"""What is smaller would vanish when it is multiplied; nobody means it."""
