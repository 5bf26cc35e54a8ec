"""The reference for the scripts: the buckets of a slot in memory, and what each call does to them."""
