"""Connecting: servers, Sentinel, Cluster and the embedded store."""
