"""Data sets on their way in: files and hub sets to rows, rows to token ids, and `prepare`."""
