"""An LLM behind an API as the reward: templates in, verdicts out, nothing lost or overspent."""
