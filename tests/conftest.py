"""What holds for every test: one thread a process, no hub, no leaked settings."""

from __future__ import annotations

import os

# Set before anything imports torch: spinning OpenMP threads make a busy machine crawl.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
