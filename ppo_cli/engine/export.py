"""Export a saved model as a Hugging Face folder with standard weight files; merges adapters.

A checkpoint of many ranks is read tensor by tensor, so that only one output file is in memory at
a time. Merging an adapter needs the whole base model in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
)

from ppo_cli.atomic import open_to_readers
from ppo_cli.config.models.folder import check_files, read_config
from ppo_cli.engine.checkpoint import StoredTensors, stored_tensors, to_file_layout
from ppo_cli.engine.export_check import (
    compare_outputs,
    compute_outputs,
    limit_of_check,
    load_whole_model,
    round_weights,
)
from ppo_cli.engine.models.lora import (
    ADAPTER_CONFIG,
    NF4,
    QUANTIZATION,
    load_adapted,
    merge_adapter,
    round_to_4_bits,
)
from ppo_cli.engine.pretrained import DAMAGED, load_part
from ppo_cli.engine.saved_files import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    add_older_names,
    model_files,
    tokenizer_files,
    write_files,
)
from ppo_cli.errors import ModelError, first_line
from ppo_cli.paths import load_json, read_text, user_path

FILE_BYTES = 5_000_000_000  # of one weight file; a larger tensor gets a separate file
BASE_FLAG, QUANTIZATION_FLAG = "--base", "--quantization"
CRITIC_HEAD = "ForTokenClassification"
# Hugging Face's name of the index.
INDEX = "model.safetensors.index.json"
# Files that are written again; all others (tokenizer, templates, code) are copied.
REPLACED_FILES = ("*.safetensors", "*.safetensors.index.json", ".*")
# Of an adapter, its card and the state of its training too.
ADAPTER_FILES = (ADAPTER_CONFIG, "README.md", "*.bin", "*.pt", "*.pth")
CRITIC_TASK = "TOKEN_CLS"  # PEFT's words for a critic, and for all that is merged
MERGED_TASKS = (None, "CAUSAL_LM", CRITIC_TASK)


@dataclass(frozen=True)
class WrittenModel:
    """Size and files of an exported model.

    `base` is the model that an adapter was merged into, `merged` in what form, and `checked` what
    was compared. A `critic` gives a value for each token.
    """

    parameters: int
    bytes: int
    dtype: str
    files: tuple[str, ...]
    base: str | None = None
    merged: str | None = None
    checked: str = ""
    critic: bool = False


def write_model(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    base: str | None = None,
    quantization: str | None = None,
    recorded: str | None = None,
    trust_remote_code: bool = False,
) -> WrittenModel:
    """Write the model saved in `source` into the empty folder `out`; dtype None keeps its dtype.

    `base` replaces the base model that an adapter names, and `quantization` what it says that
    training did to the base. `recorded` is what its run says of that, for adapters that do not.
    Raises ModelError when something is missing, damaged, does not fit or computes other numbers
    once it is written, OSError when `out` cannot be written.
    """
    torch_dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
    is_adapter = (source / ADAPTER_CONFIG).exists()
    for flag, value in ((BASE_FLAG, base), (QUANTIZATION_FLAG, quantization)):
        if value is not None and not is_adapter:
            raise ModelError(f"{source} is a whole model, not an adapter: leave {flag} out.")
    # An adapter is merged into its base model; a full model is cast file by file.
    check_files(source)
    skipped = shutil.ignore_patterns(*REPLACED_FILES, *(ADAPTER_FILES if is_adapter else ()))
    try:
        shutil.copytree(
            source, out, dirs_exist_ok=True, ignore=skipped, ignore_dangling_symlinks=True
        )
    except shutil.Error as error:  # of each file: its path, that of its copy, and the problem
        raise ModelError(f"A file of the model cannot be copied: {error.args[0][0][2]}.") from error
    if is_adapter:
        adapter = _read_adapter_config(source)
        name, critic = base or base_name(source), adapter.get("task_type") == CRITIC_TASK
        adapted, merged = _load_adapted(
            source, adapter, name, quantization, recorded, trust_remote_code=trust_remote_code
        )
        exact = compute_outputs(adapted)
        model = merge_adapter(adapted)
        del adapted
        expected = _round(model, torch_dtype, exact)
        if torch_dtype is not None:
            model = model.to(torch_dtype)
        files = model_files(model)
        if (out / GENERATION_CONFIG).exists():  # of the adapter: it lists what ended its responses
            del files[GENERATION_CONFIG]
        if not (source / "tokenizer_config.json").exists():
            tokenizer = load_part(
                AutoTokenizer, name, "tokenizer", BASE_FLAG, trust_remote_code=trust_remote_code
            )
            files |= tokenizer_files(tokenizer)
        write_files(out, files)
        write_weights(model, out)
        del model
        written = replace(_describe(out), base=name, merged=merged)
        limit = limit_of_check(written.parameters)
    else:
        _cast_weights(source, out, torch_dtype)
        written = _describe(out)
        critic = _is_critic_model(source)
        limit = limit_of_check(written.parameters)
        if "auto_map" in read_config(str(source)) and not trust_remote_code:
            limit = "it comes with Python code, which runs only with --trust_remote_code"
        if not limit:
            model = load_whole_model(
                str(source), "SOURCE", critic=critic, trust_remote_code=trust_remote_code,
                what="checkpoint",
            )  # fmt: skip
            exact = compute_outputs(model)
            expected = _round(model, torch_dtype, exact)
            del model
    _rewrite_configs(out, written.dtype)
    # Last, what is on the disk now is read as anybody would read it.
    checked = f"not compared with the checkpoint: {limit}"
    if not limit:
        checked = compare_outputs(
            out, exact, expected, critic=critic, trust_remote_code=trust_remote_code
        )
    return replace(written, checked=checked, critic=critic)


def _round(model: Any, dtype: torch.dtype | None, exact: Tensor) -> Tensor:
    """Return the outputs of a model whose weights are rounded to `dtype` in place."""
    if dtype is None:
        return exact
    round_weights(model, dtype)
    return compute_outputs(model)


def _is_critic_model(source: Path) -> bool:
    heads = read_config(str(source)).get("architectures") or []
    return source.name == "critic" or any(head.endswith(CRITIC_HEAD) for head in heads)


def _read_adapter_config(source: Path) -> dict[str, Any]:
    """Return an adapter's config."""
    try:
        config: dict[str, Any] = dict(load_json(read_text(source / ADAPTER_CONFIG)))
        return config
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{source / ADAPTER_CONFIG} is damaged.") from error


def base_name(source: Path) -> str:
    """Return the base model that a saved adapter names; ModelError if it names none."""
    name = _read_adapter_config(source).get("base_model_name_or_path")
    if not name:
        raise ModelError(f"{source} is an adapter that names no base model: give it with --base.")
    return str(name)


def _load_adapted(
    source: Path,
    adapter: dict[str, Any],
    base: str,
    quantization: str | None,
    of_run: str | None,
    *,
    trust_remote_code: bool,
) -> tuple[Any, str]:
    """Load the base model in float32 with the adapter on it; return both, and a remark.

    The base computes as in training, as far as `quantization`, the adapter or its run says how. The
    remark tells what was done to it, or is assumed.
    """
    # A path that does not exist must not be looked up on the hub.
    local = user_path(base)
    if not local.is_dir() and (local.is_absolute() or base.startswith((".", "~"))):
        raise ModelError(
            f"{source} is an adapter of {base}, which is not here: give its base model with --base."
        )
    if (task := adapter.get("task_type")) not in MERGED_TASKS:
        raise ModelError(
            f"{source} is an adapter for {task}; ppo export merges those of language models "
            "(CAUSAL_LM) and of critics (TOKEN_CLS)."
        )
    try:
        model = load_whole_model(
            base, BASE_FLAG, critic=task == CRITIC_TASK, trust_remote_code=trust_remote_code
        )
    except ModelError as error:
        raise ModelError(
            f"{source} is an adapter of {base}, which does not load. {error}"
        ) from error
    # First what the base is on the disk, then what training did to it.
    if getattr(model, "hf_quantizer", None) is not None:
        if quantization is not None:
            raise ModelError(
                f"{base} is quantised on the disk, and its adapter is merged into these weights: "
                f"leave {QUANTIZATION_FLAG} out, or give the model that it was made from with "
                f"{BASE_FLAG}."
            )
        model, remark = _dequantise(model, base), "its weights in 4 or 8 bits, read as float32"
    else:
        recorded = (adapter.get("auto_mapping") or {}).get(QUANTIZATION) or of_run
        done = quantization or recorded
        remark = "its weights as they are, as in training"
        if done == NF4:
            round_to_4_bits(model)
            remark = f"its weights rounded to {NF4}, as in training"
        elif done is None:
            remark = (
                "its weights as they are: the adapter does not say whether it was trained on them "
                f"in 4 bits; if so, ppo export merges it with {QUANTIZATION_FLAG} {NF4}"
            )
        elif recorded not in (None, done):
            remark = f"its weights as they are; training rounded them to {recorded}"
    try:
        adapted = load_adapted(model, source)
    except DAMAGED as error:
        raise ModelError(
            f"The adapter in {source} is damaged or was not trained on {base} "
            f"({first_line(error)}). Give its base model with --base."
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise ModelError(
            f"{source} is a {adapter['peft_type']} adapter, which changes no weights of its base: "
            "it cannot be merged. Load it next to its base with PEFT."
        )
    return adapted, remark


def _dequantise(model: Any, base: str) -> Any:
    """Return a model that its files hold in 4 or 8 bits with plain weights in float32."""
    try:
        plain = model.dequantize().float()
    except DAMAGED as error:  # not all kinds of quantisation can be undone
        raise ModelError(
            f"{base} is quantised in a way that transformers cannot undo ({first_line(error)}): "
            f"give the model that it was made from with {BASE_FLAG}."
        ) from error
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain._weight_conversions = None  # of transformers 5.19: how the packed weights were read
    return plain


def write_weights(model: Any, out: Path) -> None:
    """Write a model's weights into a folder, in the layout of its family's files."""
    tensors = to_file_layout(model, stored_tensors(model))
    _write_shards(out, tensors, lambda name: tensors[name].detach())


def _cast_weights(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Write a checkpoint's weights again, floating-point tensors cast to `dtype`."""
    try:
        stored = StoredTensors(source, "model")
    except ModelError as error:
        raise ModelError(f"The checkpoint {source} is damaged: {error}") from error

    def read(name: str) -> Tensor:
        tensor = stored[name]
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    with closing(stored):
        if not stored:
            raise ModelError(f"The checkpoint {source} is damaged: its files hold no tensors.")
        _write_shards(out, stored, read)


def _write_shards(out: Path, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Write weight files of at most FILE_BYTES with Hugging Face's names, and their index."""
    # Plan the files without data, then read tensor by tensor.
    sizes = {name: torch.empty_like(read(name), device="meta") for name in names}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_BYTES)
    for file, group in plan.filename_to_tensors.items():
        try:
            tensors = {name: read(name).contiguous() for name in group}
            save_file(tensors, out / file, metadata={"format": "pt"})
            open_to_readers(out / file)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    if plan.is_sharded:
        parameters = sum(tensor.numel() for tensor in sizes.values())
        index = {
            "metadata": {"total_parameters": parameters} | plan.metadata,
            "weight_map": dict(sorted(plan.tensor_to_filename.items())),
        }
        (out / INDEX).write_text(json.dumps(index, indent=2))


def _describe(out: Path) -> WrittenModel:
    """Count parameters and bytes of the weight files."""
    # Headers are enough: no tensor is read.
    parameters = size = 0
    dtypes: dict[str, int] = {}
    files = sorted(path.name for path in out.glob("*.safetensors"))
    for file in files:
        size += (out / file).stat().st_size
        with safe_open(out / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_slice(name)
                count = torch.Size(tensor.get_shape()).numel()
                parameters += count
                dtypes[tensor.get_dtype()] = dtypes.get(tensor.get_dtype(), 0) + count
    # Norms may be in another dtype: the one with the most parameters counts.
    dtype = max(dtypes, key=lambda name: dtypes[name])
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    return WrittenModel(parameters, size, names.get(dtype, dtype.lower()), tuple(files))


def _rewrite_configs(out: Path, dtype: str) -> None:
    """Write the dtype of the weights into the config, and the names that older readers know."""
    names = (CONFIG, TOKENIZER_CONFIG, TOKENIZER)
    try:
        files = {name: (out / name).read_bytes() for name in names if (out / name).exists()}
        files[CONFIG] = json.dumps(load_json(files[CONFIG].decode()) | {"dtype": dtype}).encode()
        write_files(out, add_older_names(files))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"The checkpoint is damaged: {out / CONFIG} ({first_line(error)})."
        ) from error
