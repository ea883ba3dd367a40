"""What this package adds to ppo-cli; pyproject.toml names these as entry points."""

from __future__ import annotations

from ppo_cli.plugins import Command, Engine, Reader

bridge = Command(
    app="ppo_cli.extras.migrate.bridge.commands:app",
    help="Run the same settings and rewards on verl.",
    section="Train",
)
engine = Engine(
    train="ppo_cli.extras.migrate.bridge.commands:train_on_verl",
    plan="ppo_cli.extras.migrate.bridge.commands:print_verl_plan",
    advise="ppo_cli.extras.migrate.bridge.commands:suggest_verl",
)
# Flags of TRL and OpenRLHF, and the launchers of all three.
flags = Reader(
    line="ppo_cli.extras.migrate.flags:translate",
    explain="ppo_cli.extras.migrate.flags:explain_flag",
)
# Readers work in the order of their entry points: that of weights follows the one of verl, which
# renames their section.
verl = Reader(
    layers="ppo_cli.extras.migrate.verl.translator:translate",
    sections={
        "verl": "Version of verl whose defaults apply.",
        "actor_rollout_ref": "verl's name for actor, rollout, ref and model.",
        "composite_reward": "The parts of a mixture.",
        "custom_reward_function": "verl's name for the reward function.",
        "reward_model": "verl's name for the reward model.",
    },
)
weights = Reader(layers="ppo_cli.extras.migrate.weights:translate")
