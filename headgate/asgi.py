"""Limits for ASGI applications: Starlette, FastAPI and others."""

from limiter.client.middleware.asgi_middleware import AsgiRequest, HeadgateMiddleware
from limiter.client.middleware.measured_work import MeasuredWork

__all__ = ["AsgiRequest", "HeadgateMiddleware", "MeasuredWork"]
