"""The command line: `headgate …`."""
