"""The run folder on the disk: line files and checkpoints."""
