"""What several whole runs are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppo_cli.config.models.bundled import model_folder


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a random head: a reward model of no merit, but a real one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source, folder = model_folder("embedded"), tmp_path_factory.mktemp("rm")
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
