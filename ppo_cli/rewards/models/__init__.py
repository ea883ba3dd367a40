"""Reward models on this machine: how each is read, asked and trusted."""
