"""Headgate: a distributed, work-based rate limiter and overload controller on Redis."""
