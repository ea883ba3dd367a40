"""What a run reports: metrics, health findings, trackers."""
