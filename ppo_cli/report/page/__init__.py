"""The page about runs: their curves, responses and settings, served or as one file."""
