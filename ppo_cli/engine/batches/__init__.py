"""How rows of a batch are grouped and laid out for a model."""
