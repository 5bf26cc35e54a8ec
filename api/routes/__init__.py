"""FastAPI routes: management, health, metrics and documentation."""
