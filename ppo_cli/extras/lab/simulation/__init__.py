"""The learner on tensors without numbers: what `ppo plan --simulate` runs, in a child process."""
