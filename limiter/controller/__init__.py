"""The controller: owns slots by leases, looks at what changed in them, and moves what the pure steps say.

policies ──► plan: what there is to steer, and how
members  ──► ownership: who ought to own which namespace      lease ──► who does
cycle    ──► sample → records → limiter.model.control.cycle → steer   balance ──► shares of divided limits
                                └► overload: throttles, rates and quality of buckets with an `overload` block
"""
