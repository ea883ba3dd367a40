"""Scores rows without training: reading, scoring, figures, and the forecast of a run."""
