"""The event loop and child processes: waiting for outcomes, pausing for other tasks, stopping in order."""
