"""Bounds of numbers, whatever their source."""

from __future__ import annotations

NUMBER_MAX = 2.0**53
"""The largest number whose units float64, Lua and JSON represent exactly."""

DIMENSIONS_MAX = 32
"""Dimensions of a descriptor, and of whatever a policy says about them."""

LEAST = 1e-9
"""The smallest number: less would vanish in products, and has no use."""
