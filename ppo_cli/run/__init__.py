"""Puts a run together: reads the config, builds engine and reward, starts the loop."""
