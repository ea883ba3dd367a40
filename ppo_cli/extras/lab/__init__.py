"""Audits, calibration, prompts and fits of rewards, the simulated learner: no run needs these."""
