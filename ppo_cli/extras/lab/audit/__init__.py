"""Attacks on rewards before training, and what they show."""
