"""What holds in a run: every setting decided, placement, batches, memory, and what is wrong."""
