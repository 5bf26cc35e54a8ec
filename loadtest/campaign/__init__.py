"""A campaign of hostile traffic against real nodes, while somebody well-behaved is served and keeps exact accounts."""
