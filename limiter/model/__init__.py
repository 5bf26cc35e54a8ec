"""Pure values and arithmetic: no I/O, no clock, no randomness."""
