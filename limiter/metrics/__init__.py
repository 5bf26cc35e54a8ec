"""The metrics of a node: every metric by name, and the way from plain numbers to the answer to a scrape.

    tallies ──► readings ──► exposition ──► /metrics
                   └► processes: files in which the processes of one machine share their numbers

A node's part: `api.routes.metrics`. A controller's: `limiter.cli.controller_metrics`.
"""
