"""The event loop and processes: whom to tell, when to let others have a turn, who ends with whom."""
