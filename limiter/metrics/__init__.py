"""What operators see of a node: every metric by name, and how plain numbers become an answer to a scrape.

tallies ──► readings ──► exposition ──► /metrics
               └► processes: files that the processes of one machine leave for whoever is scraped

A node's part: `api.routes.metrics`. A controller's: `limiter.cli.controller_metrics`.
"""
