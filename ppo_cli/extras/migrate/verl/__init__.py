"""Translates the names of verl and of the older YAML style into names of our own settings."""
