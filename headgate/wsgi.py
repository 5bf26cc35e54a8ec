"""Limits for WSGI applications: Flask, Django and others."""

from limiter.client.middleware.measured_work import MeasuredWork
from limiter.client.middleware.wsgi_middleware import (
    DjangoRefusals,
    HeadgateMiddleware,
    WsgiRequest,
    throttled_response,
)

__all__ = ["DjangoRefusals", "HeadgateMiddleware", "MeasuredWork", "WsgiRequest", "throttled_response"]
