"""Scores rows without training: reading, scoring, figures, audits, and the forecast of a run."""
