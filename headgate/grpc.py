"""Limits for servers of grpc.aio; needs the package grpcio."""

from limiter.client.middleware.grpc_interceptor import GrpcRequest, HeadgateInterceptor
from limiter.client.middleware.measured_work import MeasuredWork

__all__ = ["GrpcRequest", "HeadgateInterceptor", "MeasuredWork"]
