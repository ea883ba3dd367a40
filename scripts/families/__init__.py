"""The model families of docs/models.md: tiny models, the oracle, and the checks of one family."""
