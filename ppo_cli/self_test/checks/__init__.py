"""What the self-test computes: functions that take a `Setup` and fill `Results`."""
