"""vLLM's weight transfer: the trainer's side and the worker's side."""
