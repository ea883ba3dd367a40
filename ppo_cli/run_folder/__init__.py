"""A run on the disk: line files, folder, checkpoints, models in them, and a copy elsewhere."""
