"""The stages of a training step: sampling, scores, shaping, update; checkpoints and stops."""
