"""Stages of the training loop: shaping of rewards, and the state that a resume needs."""
