"""What may be written into a field of a policy: amounts, names, patterns, times; and how it is refused."""
