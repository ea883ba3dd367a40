"""Words in, words out: commands, flags, screen. Nothing heavy at module level."""
