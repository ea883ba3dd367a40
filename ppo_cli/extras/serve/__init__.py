"""Serves models to training loops of other programs, over the Tinker protocol."""
