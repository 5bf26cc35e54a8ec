"""Locust users of Headgate: `make loadtest`, or `python -m loadtest.locust`; see docs/loadtest.md.

Only `locustfile.py` imports Locust, which patches the standard library of whatever process imports it.
"""
