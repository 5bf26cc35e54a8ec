"""A workbench for control laws, in virtual time: the same buckets, scripts' reference and controller as in production.

    flow.py      demand ──► a limit of work ──► requests cost so much, take so long, settle     caps, charges, `auto`
    service.py   users ──► a gate ──► a backend that queues, shares or slows down               overload control
    steered.py   buckets in memory, decided by the reference of the scripts, steered by the controller's own cycle
    judge/       scenarios, the figures that each owes, tables

Nothing sleeps and nothing is drawn but from the seed: a run is the same every time.

python -m loadtest.simulation judge               every law against every scenario, see docs/judge.md
python -m loadtest.simulation workloads           a dozen workloads under every mechanism, as a table
python -m loadtest.simulation run cost-up         one of them, second by second
python -m loadtest.simulation run cost-up --svg FILE   and its picture
"""
