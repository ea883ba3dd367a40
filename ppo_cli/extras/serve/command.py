"""`ppo serve --tinker`: a model for training loops that speak the Tinker protocol."""

from __future__ import annotations

import socket
from dataclasses import replace

import typer

from ppo_cli.allocator import pause_garbage_collection
from ppo_cli.cli.flags import Arguments, add_command, make_flag, make_switch
from ppo_cli.cli.help import App
from ppo_cli.errors import ConfigError, UserError

# One process holds all models; the settings of the command line come later.
ENGINE = ("trainer.engine=local", "rollout.name=hf")


def serve(arguments: Arguments) -> None:
    """Serve a model to training loops of your own, over the Tinker protocol; Ctrl-C ends it.

    What clients save is below --output_dir. Settings are those of `ppo train`: the models of
    clients take those of model, critic and reference, and /ppo/score takes those of the reward.
    """
    extras = arguments.extras
    if not extras["tinker"]:
        raise ConfigError("Name the protocol: --tinker.")
    resolved = replace(arguments, overrides=(*ENGINE, *arguments.overrides)).resolve_node()
    try:
        listener = socket.create_server(("127.0.0.1", extras["port"]))
    except OSError as error:
        raise UserError(
            f"The server cannot listen on --port {extras['port']} ({error.strerror}): choose "
            "another one."
        ) from error
    with pause_garbage_collection():
        from ppo_cli.extras.serve.server import TinkerServer
    with listener:
        TinkerServer(resolved, extras["served_name"]).serve(listener, typer.echo)


serve_app = App()
add_command(
    serve_app,
    serve,
    "ppo serve --tinker --model embedded --port 8765",
    [
        make_switch("tinker", "Speak the protocol of the Tinker SDK."),
        make_flag(
            "port", int, 8765, "Port on this machine; 0: a free one.", "PORT", min=0, max=65535
        ),
        make_flag("served_name", str, None, "Name by which clients may ask for --model.", "NAME"),
    ],
    ("model.path", "trainer.seed", "trainer.output_dir", "algorithm.adv", "critic.", "reward."),
)
