"""Which model the words MODEL, RUN, RUN@STEP and --checkpoint name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.digests import require_intact
from ppo_cli.errors import ModelError, UserError, did_you_mean
from ppo_cli.paths import user_path
from ppo_cli.run_folder.checkpoints import STEP_NAME, CheckpointStore
from ppo_cli.run_folder.folder import run_settings

# One of them shows that a folder is a model.
MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class ModelSource:
    """A model: the name as typed, the path to load, and the run that it belongs to."""

    name: str
    path: str
    run: Path | None = None


def find_source(word: str) -> ModelSource:
    """The model that MODEL, RUN, RUN@STEP or a checkpoint means; ModelError if there is none."""
    path, which = word, ""
    if "@" in word and not user_path(word).exists():
        # An @ separates the checkpoint, unless it is part of an existing path.
        path, _, which = word.rpartition("@")
    folder = user_path(path)
    # A model folder or a hub name is used as it is.
    if not which and (not folder.is_dir() or (folder / "config.json").exists()):
        check_folder(model_folder(path), "MODEL")
        return ModelSource(word, model_folder(path))
    model = find_model(folder, which or None, critic=False).resolve()
    run = model.parents[2]
    return ModelSource(word, str(model), run if (run / "config.yaml").is_file() else None)


def find_model(source: Path, checkpoint: str | None, *, critic: bool) -> Path:
    """The folder of the model in a run or checkpoint; ModelError if there is none."""
    if not source.is_dir():
        near = [p.name for p in source.parent.iterdir()] if source.parent.is_dir() else []
        raise ModelError(
            f"There is no folder {source}.{did_you_mean(source.name, near)} Name a run (an "
            "--output_dir) or a checkpoint."
        )
    # A run folder, one checkpoint, or one model: tried in this order.
    store = _find_store(source)
    if store is not None:
        return _model_in_checkpoint(_choose_checkpoint(store, checkpoint), critic=critic)
    if checkpoint is not None:
        raise ModelError(f"{source} is not a run, so --checkpoint has nothing to choose from.")
    if has_model(source):
        if critic and source.name != "critic":
            raise ModelError(f"{source} is one model: leave --critic out, or name its checkpoint.")
        return source
    return _model_in_checkpoint(source, critic=critic)


def _find_store(source: Path) -> CheckpointStore | None:
    """The checkpoints of a run folder, or of the folder `checkpoints/` itself."""
    for folder in (source / "checkpoints", source):
        store = CheckpointStore(folder, keep=1)
        if store.steps():
            return store
    if (source / "checkpoints").is_dir() or (source / "metrics.jsonl").exists():
        raise ModelError(
            f"{source} has no complete checkpoint yet. A run writes one every --save_freq steps "
            "and one at the end."
        )
    return None


def _choose_checkpoint(store: CheckpointStore, checkpoint: str | None) -> Path:
    """The checkpoint that `--checkpoint best|latest|10|step_000010|PATH` means; None is the latest.

    ModelError if it does not exist.
    """
    newest = store.newest()
    assert newest is not None
    # By a fixed word, by step, by name, or by path.
    if checkpoint is None or checkpoint == "latest":
        return newest
    if checkpoint.isdigit():
        checkpoint = f"step_{int(checkpoint):06d}"
    names = [f"step_{step:06d}" for step in store.steps()]
    if checkpoint in names or checkpoint == "best":
        path = store.directory / checkpoint
        if not path.is_dir():
            raise ModelError(
                f"{store.directory} has no best checkpoint: only validation (--val_files) shows "
                f"which one it is. There are {', '.join(names)}."
            )
        return path
    path = user_path(checkpoint)
    if not path.is_dir():
        raise ModelError(
            f"There is no checkpoint {checkpoint} in {store.directory}, and no such folder."
            f"{did_you_mean(checkpoint, [*names, 'best', 'latest'])} There are {', '.join(names)}."
        )
    return path


def _model_in_checkpoint(checkpoint: Path, *, critic: bool) -> Path:
    """Return the actor's or critic's folder in a checkpoint; ModelError if missing."""
    folder = checkpoint / ("critic" if critic else "actor")
    if has_model(folder):
        return folder
    # A damaged checkpoint gets its own message first.
    require_intact(checkpoint, below=folder.name)
    if critic and has_model(checkpoint / "actor"):
        raise ModelError(f"{checkpoint} has no critic: its advantage estimator does not use one.")
    raise ModelError(
        f"{checkpoint} is neither a run, a checkpoint nor a model: {folder.name}/ with a "
        "config.json is missing."
    )


def has_model(folder: Path) -> bool:
    """Whether a folder is a saved model or adapter."""
    return any((folder / name).exists() for name in MODEL_FILES)


def recorded_quantization(model: Path) -> str | None:
    """Return what the run of a saved model says that training did to its base: nf4 or none.

    None if the model is in no run, or its settings cannot be read.
    """
    model = model.resolve()
    if not STEP_NAME.match(model.parent.name) or not (model.parents[2] / "config.yaml").is_file():
        return None
    try:
        config = run_settings(model.parents[2])
    except UserError:
        return None
    part = config.critic.model if model.name == "critic" else config.model
    return part.quantization or "none"
