"""Judges asked through the batch interfaces of their providers."""
