"""Buckets: records, the ledger of a slot, operations, reservations and decisions."""
