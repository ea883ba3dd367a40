"""The parts of the build of the embedded model: task, tokenizer, warm-up."""
