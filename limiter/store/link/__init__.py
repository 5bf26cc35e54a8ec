"""Connections to servers, Sentinel, Cluster and the embedded store."""
