"""What the entry points of pyproject.toml name: commands, and a section of the plan."""

from ppo_cli.plugins import Command, PlanSection

_COMMANDS = "ppo_cli.extras.lab.commands"
prepare = Command(
    f"{_COMMANDS}.prepare:app",
    "Write a well-known set as verl-style parquet files, ready for --train_files.",
)
prompts = Command(
    f"{_COMMANDS}.prompts:app", "List judge prompts, or show the request for a data row.", "Judge"
)
models = Command(
    f"{_COMMANDS}.models:app",
    "List the models that your judge keys may use, with prices, limits and end dates.",
    order=80,
)
audit = Command(
    f"{_COMMANDS}.audit:app", "Test a reward with worthless and hostile responses.", order=90
)
calibrate = Command(
    f"{_COMMANDS}.calibrate:app", "Compare a reward's scores with labels from people."
)
fit = Command(
    f"{_COMMANDS}.fit:app",
    "Train a reward model from pairs of responses (Bradley-Terry), or a judge from labels.",
)
simulate = PlanSection(
    flag="simulate",
    help="Also measure the GPU memory of a step (minutes).",
    key="simulation",
    measure="ppo_cli.extras.lab.simulation.simulate:measure",
)
