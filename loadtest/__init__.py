"""Load tests of Headgate: benchmarks, experiments, simulations, Locust users, the proof of a fleet."""
