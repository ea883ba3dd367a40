"""The page about runs: curves, responses and settings, served or as one file."""
