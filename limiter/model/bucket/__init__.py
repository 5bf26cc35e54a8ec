"""Buckets: records and their parts, operations, reservations and decisions."""
