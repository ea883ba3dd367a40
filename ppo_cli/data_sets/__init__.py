"""Data sets: files and hub sets to rows, rows to token ids, and `prepare`."""
