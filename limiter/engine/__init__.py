"""Acquire and settle: descriptor → plan → batcher → decision, with deadlines and failure modes."""
