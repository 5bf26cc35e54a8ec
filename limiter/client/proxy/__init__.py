"""The proxy's decisions: what it asks, what it knows, what it grants from its leases (G7). HTTP is `limiter.cli`'s."""
