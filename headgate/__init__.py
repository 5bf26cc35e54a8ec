"""The client of Headgate, as programs import it. `pip install headgate` brings it without the service."""

from limiter.client.adaptive import AdaptiveThrottle
from limiter.client.client_metrics import metrics
from limiter.client.gate import Headgate
from limiter.client.grants import Grant
from limiter.client.lease.holder import Lease
from limiter.client.middleware.cost import cpu_cost, cpu_time_of
from limiter.client.middleware.decorator import limited
from limiter.client.middleware.measured_work import present_grant
from limiter.client.request_context import CarryingExecutor, carry, criticality, raised
from limiter.client.retry_budget import RetryBudget
from limiter.client.sync_gate import SyncHeadgate
from limiter.client.throttled import HeadgateError, Misused, Throttled

__all__ = [
    "AdaptiveThrottle",
    "CarryingExecutor",
    "Grant",
    "Headgate",
    "HeadgateError",
    "Lease",
    "Misused",
    "RetryBudget",
    "SyncHeadgate",
    "Throttled",
    "carry",
    "cpu_cost",
    "cpu_time_of",
    "criticality",
    "limited",
    "metrics",
    "present_grant",
    "raised",
]
