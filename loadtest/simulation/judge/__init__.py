"""The judge: every control law against scenarios that nobody tuned it to, in tables with the figures that are owed.

cases.py            what is played, and the lines that say what came of it
limiters.py         the laws for limits of work          grid.py, jumps.py, held_out.py    their tables
scenes.py           loads and backends                   response_times.py, expected_times.py    their tables
verdicts.py         plays all of it and prints the tables
"""
