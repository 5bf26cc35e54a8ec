"""The controller: owns slots by leases, reads the buckets that changed and writes the results of the pure steps.

policies ──► plan: the limits to steer, and their parameters
members  ──► ownership: which controller should own a namespace      lease ──► which one does
cycle    ──► sample → records → limiter.model.control.cycle_step → steer   balance ──► shares of divided limits
                                └► overload: throttles, rates and quality of buckets with an `overload` block
"""
