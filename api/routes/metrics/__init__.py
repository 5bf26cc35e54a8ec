"""The answer to a scrape: the counters of this process, and the buckets of policies without `per`."""
