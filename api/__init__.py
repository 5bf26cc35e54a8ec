"""The HTTP face of Headgate."""
