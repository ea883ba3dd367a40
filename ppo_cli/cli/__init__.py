"""Commands, flags and screen output. No heavy imports at module level."""
