"""Recipes of docs/recipes/, each run as its page says; and clients in other languages."""
