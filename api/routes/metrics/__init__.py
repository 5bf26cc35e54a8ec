"""The answer to a scrape: what this process counted, and the buckets of policies that have only one."""
