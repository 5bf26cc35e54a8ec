"""Celery tasks that wait for work tokens: all workers together read 1000 rows a second from the warehouse.

headgate up --policies docs/recipes/policies.yaml
celery --workdir docs/recipes -A celery_tasks worker
python docs/recipes/celery_tasks.py 500 20 500
"""

import os
import sys
import time

from celery import Celery, Task

from headgate import Headgate, Throttled

broker = os.environ.get("BROKER", "redis://127.0.0.1:6379")
app = Celery("reports", broker=broker, backend=broker)
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1)
gate = Headgate.sync(on_refused="wait", wait_s=30)


def read_rows(rows: int) -> int:
    """Stands for a query."""
    return rows


@app.task(bind=True, name="report", max_retries=None)
def report(self: Task, rows: int) -> tuple[float, float, int]:
    """Return when it began to wait, when it was let in, and in which process."""
    asked_s = time.time()
    try:
        with gate.acquire({"service": "warehouse"}, work=rows) as grant:
            granted_s = time.time()
            grant.settle(work=read_rows(rows))
    except Throttled as refusal:  # not within 30 s: back into the queue, so that the worker is free
        raise self.retry(exc=refusal, countdown=(refusal.retry_after_ms or 1000) / 1000) from refusal
    return asked_s, granted_s, os.getpid()


if __name__ == "__main__":
    for sent in [report.delay(int(rows)) for rows in sys.argv[1:]]:
        print(*sent.get(timeout=60))
