"""What people write, resolved to numbers: policies, matching, quantities, periods and the log of their changes."""
