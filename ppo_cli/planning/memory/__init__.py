"""How many bytes a run needs on each device, and what to do when they do not fit."""
