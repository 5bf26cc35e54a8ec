"""Routes that read and change policies and namespaces."""
