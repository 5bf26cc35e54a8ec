"""A campaign of hostile traffic against real nodes, beside a well-behaved customer that keeps exact accounts."""
