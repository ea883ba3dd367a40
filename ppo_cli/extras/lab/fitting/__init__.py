"""Reward models made from preference pairs."""
