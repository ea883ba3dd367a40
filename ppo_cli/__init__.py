"""ppo-cli: train language models with PPO, with an LLM judge as the reward."""

__version__ = "0.1.0"
