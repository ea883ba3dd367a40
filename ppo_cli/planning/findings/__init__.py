"""Checks of settings: clashes, settings without effect, what a machine lacks, and remarks."""
