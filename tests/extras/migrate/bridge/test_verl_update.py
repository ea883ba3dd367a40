"""One update on the same batch, by verl's FSDP engine on the CPU and by ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import merge_sums
from ppo_cli.engine.models import load_policy
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.training.actor_critic import ActorLearner, CriticLearner
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.extras.migrate.bridge.overrides import build_overrides
from tests.engine.test_learners import COMPUTE, TOKENS, make_batch
from tests.extras.migrate.bridge.settled import settled
from tests.settings import CPU

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
ROWS = 16


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl 0.9.1 is not here")
def test_losses_and_norms_are_verls(tmp_path: Path) -> None:
    torch.manual_seed(3)
    value_model = load_value_model(model_folder("embedded"))
    torch.nn.init.normal_(value_model.head.weight, std=0.1)
    value_model.model.save_pretrained(tmp_path / "critic")
    config = settled(
        "model.dtype=float32", "trainer.n_gpus_per_node=1", "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.1", "actor.entropy_coeff=0.01", "rollout.temperature=0.7",
        "actor.clip_ratio_high=0.28", "actor.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4", "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=16", "model.enable_gradient_checkpointing=false",
        f"critic.model.path={tmp_path / 'critic'}",
    )  # fmt: skip
    batch = make_batch(rows=ROWS)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    torch.save(fields | {"loss_mask_BT": batch.loss_mask_BT}, tmp_path / "batch.pt")
    lines = build_overrides(config, CPU).lines(tmp_path)
    (tmp_path / "overrides").write_text("".join(f"{line}\n" for line in lines))
    # By its path: verl's own package has a folder tests.
    command = [sys.executable, str(Path(__file__).with_name("verl_update.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "verl.json").read_text())

    policy = load_policy(model_folder("embedded"))
    reference = load_policy(model_folder("embedded"))
    of_actor = Optimizer(policy.model, config.actor.optim, total_steps=1, grad_clip=1.0,
                         clip_grad_value=None)  # fmt: skip
    of_critic = Optimizer(value_model.model, config.critic.optim, total_steps=1, grad_clip=1.0,
                          clip_grad_value=None)  # fmt: skip
    actor = ActorLearner(policy, reference, config.actor, TOKENS, of_actor, COMPUTE, 0.7)
    critic = CriticLearner(value_model, config.critic, TOKENS, of_critic, COMPUTE)
    sums = merge_sums([actor.step(batch), critic.step(batch)])
    actual = {name: total / count for name, (total, count) in sums.items()}
    for custom, name in {
        "policy_loss": "language_model/actor/pg_loss",
        "actor/entropy_loss": "language_model/actor/entropy_loss",
        "actor/kl_loss": "language_model/kl_loss",
        "grad_norm": "language_model/grad_norm",
        "value_loss": "value_model/critic/vf_loss",
        "critic_grad_norm": "value_model/grad_norm",
    }.items():
        print(f"{custom}: ours {actual[custom]:.8f}, verl's {summary[name]:.8f}")
        assert actual[custom] == pytest.approx(summary[name], abs=1e-5, rel=1e-5), custom
