"""Calibration, prompts and fits of rewards, and the simulated learner: no run needs these."""
