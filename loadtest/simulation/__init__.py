"""The controller against workloads, in virtual time: the same bucket and the same steps as in production.

    arrivals ──► limiter.model.bucket.ledger ──► work done, settled after a while
                      ▲      │
                      └──────┴── every 100 ms: limiter.model.control.cycle

Nothing sleeps and nothing is drawn but from the seed: a run is the same every time.

python -m loadtest.simulation                     every workload under every mechanism, as a table
python -m loadtest.simulation cost-up             one of them, second by second
python -m loadtest.simulation cost-up --svg FILE  and its picture
"""
