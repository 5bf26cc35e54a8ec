"""The values of a policy's fields: amounts, names, patterns, times; and how a wrong one is refused."""
