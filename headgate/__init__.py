"""The client of Headgate, as programs import it. `pip install headgate` brings it without the service."""

from limiter.client.holder import Lease

__all__ = ["Lease"]
