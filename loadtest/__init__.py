"""Load on Headgate, and what it shows: benchmarks, experiments, simulations, Locust users, the proof of a fleet."""
