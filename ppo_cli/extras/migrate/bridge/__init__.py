"""The way to verl: the same settings and rewards on its engine, and its results read back."""
