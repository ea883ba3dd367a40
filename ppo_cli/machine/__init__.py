"""This machine: its GPUs, its processor, the torch build, and what its self-test recorded."""
