"""What a reward is worth: scores of a file, agreement with labels, and attacks on a judge."""
