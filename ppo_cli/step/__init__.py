"""The stages of a training step: sampling, scores, shaping, update; and the state of a run."""
