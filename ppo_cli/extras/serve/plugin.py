"""What the entry point of pyproject.toml names: `ppo serve`."""

from ppo_cli.plugins import Command

serve = Command(
    "ppo_cli.extras.serve.command:serve_app",
    "Serve a model to loops of your own (Tinker protocol).",
    "Train",
    order=10,
)
