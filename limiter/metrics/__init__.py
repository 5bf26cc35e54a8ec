"""What operators see of a node: every metric by name, and how plain numbers become an answer to a scrape.

tallies ──► node, controller: readings ──► exposition ──► /metrics
               └► processes: files that the processes of one machine leave for whoever is scraped ──┘
store   ──► named: the buckets of policies that have only one ───────────────────────────────────────┘
"""
