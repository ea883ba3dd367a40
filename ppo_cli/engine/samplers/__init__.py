"""Samplers: Hugging Face models with our own cache, and vLLM with its weight transfer."""
