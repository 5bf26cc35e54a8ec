"""Policies as people write them, resolved to numbers: matching, quantities, periods and the log of changes."""
