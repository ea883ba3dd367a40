"""Commands, flags and screen output. Nothing heavy at module level."""
