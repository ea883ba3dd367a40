"""Strings in, Score out."""
