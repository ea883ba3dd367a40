"""Output of a run: metrics, health findings, loggers, and the page."""
