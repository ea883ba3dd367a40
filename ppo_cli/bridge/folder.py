"""Writes the folder that verl runs from: overrides, a script per node, reward file, rows, settings.

The folder is the run folder too: what verl logs is read back into it (see rewards.py).
All nodes must see it under the same path.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_cli.atomic import replacing
from ppo_cli.bridge.overrides import TRAIN, VAL, VERSION, Bridged
from ppo_cli.bridge.rewards import ROW, STOPPED, row_of
from ppo_cli.config.derived import Split, rows_missing, split_files
from ppo_cli.config.plan import config_yaml
from ppo_cli.config.resolve import Resolved
from ppo_cli.config.schema import Config
from ppo_cli.data_sets.prompts import unique_labels
from ppo_cli.data_sets.rows import load_sets, prompt_of
from ppo_cli.errors import ConfigError, failing
from ppo_cli.records import Prompt
from ppo_cli.run_folder import RunFolder
from ppo_cli.trust.sources import row_checks

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
REWARD = '''\
"""Scores responses for verl by the settings in config.yaml beside this file."""

from pathlib import Path

from ppo_cli.bridge.rewards import reward_function

compute_score = reward_function(Path(__file__).resolve().parent, {where!r})
'''
HEAD = """\
#!/usr/bin/env bash
# {what}
# Python is ${{PYTHON:-python}}: it needs verl {version}, its engines, and ppo-cli.
set -u
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
python=${{PYTHON:-python}}
address={address}
port=${{MASTER_PORT:-{port}}}
patience=${{NODE_TIMEOUT:-{patience}}}  # seconds to wait for other nodes
# Ray's nodes know each other by a token from 2.60 on: on an open network set this to token, and the
# same RAY_AUTH_TOKEN on every node.
export RAY_AUTH_MODE=${{RAY_AUTH_MODE:-disabled}}
"""
FIRST = """\
rm -f "$here/{stopped}"
mkdir -p "$here/verl"
if [ -z "${{RAY_ADDRESS:-}}" ]; then
    ray start --head --node-ip-address="$address" --port="$port" --disable-usage-stats || exit 1
    trap 'ray stop' EXIT
    export RAY_ADDRESS="$address:$port"
fi
joined() {{
    "$python" -c 'import ray; ray.init("auto", logging_level=40, log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null | tail -n 1
}}
ends=$((SECONDS + patience))
until [ "$(joined)" -ge {nodes} ] 2>/dev/null; do
    if [ "$SECONDS" -ge "$ends" ]; then
        echo "After $patience s only $(joined) of {nodes} nodes have joined $RAY_ADDRESS. Start" \\
            "node_1.sh and so on there, with MASTER_ADDR=$address, or set NODE_TIMEOUT." >&2
        exit 3
    fi
    sleep 2
done
mapfile -t overrides < "$here/overrides"
log="$here/verl/metrics_$(date +%Y%m%d_%H%M%S).jsonl"
environ=++ray_kwargs.ray_init.runtime_env.env_vars
"$python" -m verl.trainer.main_ppo "${{overrides[@]}}" "$environ.VERL_FILE_LOGGER_PATH=\\"$log\\"" &
run=$!
trap 'kill "$run" 2>/dev/null' INT TERM
while kill -0 "$run" 2>/dev/null; do
    if [ -e "$here/{stopped}" ]; then
        kill "$run"
        break
    fi
    sleep 2
done
wait "$run"
status=$?
"$python" -m ppo_cli bridge read "$here"
if [ -e "$here/{stopped}" ]; then
    cat "$here/{stopped}" >&2
    exit 3
fi
exit "$status"
"""
OTHER = """\
ends=$((SECONDS + patience))
until ray start --address="$address:$port" --disable-usage-stats; do
    if [ "$SECONDS" -ge "$ends" ]; then
        echo "After $patience s there is no Ray head at $address:$port. Start node_0.sh there," \\
            "or set MASTER_ADDR and NODE_TIMEOUT." >&2
        exit 3
    fi
    sleep 2
done
trap 'ray stop' EXIT
while ray status --address="$address:$port" >/dev/null 2>&1; do
    sleep 10
done
"""


def write_folder(folder: Path, resolved: Resolved, bridged: Bridged) -> list[Path]:
    """Write all that verl needs; returns the files. Rows are read as for training."""
    config = resolved.config
    folder = folder.resolve()
    prompts = {TRAIN: prompts_of(config, "train")}
    if config.data.val_files:
        prompts[VAL] = prompts_of(config, "val")
    check_rows(config, prompts)
    RunFolder(folder, "--out").prepare()
    (folder / "data").mkdir(exist_ok=True)
    for name, rows in prompts.items():
        write_rows(folder / name, rows, Path(name).stem)
    texts = {
        "config.yaml": config_yaml(resolved),
        "overrides": "".join(f"{line}\n" for line in bridged.lines(folder)),
        "reward.py": REWARD.format(where=str(Path.cwd())),
        **scripts(config),
    }
    for name, text in texts.items():
        with replacing(folder / name) as fresh:
            fresh.write_text(text, encoding="utf-8")
            fresh.chmod(0o755 if name.endswith(".sh") else 0o644)
    return [folder / name for name in (*texts, *prompts)]


def check_rows(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Raise ConfigError for rows that are too few, or lack what the reward needs."""
    problems = [said] if (said := rows_missing(config, len(prompts[TRAIN]))) else []
    rows = [prompt for found in prompts.values() for prompt in found]
    problems += failing(row_checks(config.reward, rows, all_known=True))
    if problems:
        raise ConfigError(problems)


def scripts(config: Config) -> dict[str, str]:
    """Return the script of each node: the first is Ray's head, waits for the others and submits."""
    trainer = config.trainer
    alone = trainer.nnodes == 1
    needed = '"${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"'
    given = shlex.quote(trainer.master_addr or "127.0.0.1")
    facts = {
        "address": f"${{MASTER_ADDR:-{given}}}" if alone or trainer.master_addr else needed,
        "port": trainer.master_port, "patience": trainer.node_timeout, "version": VERSION,
        "nodes": trainer.nnodes, "stopped": STOPPED,
    }  # fmt: skip
    first = "Node 0: starts Ray's head, waits for the other nodes, and trains."
    found = {"node_0.sh": (HEAD + FIRST).format(what=first, **facts)}
    for rank in range(1, trainer.nnodes):
        what = f"Node {rank}: joins the Ray head of node 0, and stays until that is gone."
        found[f"node_{rank}.sh"] = (HEAD + OTHER).format(what=what, **facts)
    return found


def write_rows(path: Path, prompts: Sequence[Prompt], split: str) -> None:
    """Write prompts as verl's rows; all that scoring needs lies in extra_info as one text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(prompt, split, i) for i, prompt in enumerate(prompts)]
    with replacing(path) as fresh:
        pq.write_table(pa.Table.from_pylist(rows), fresh)


def prompts_of(config: Config, split: Split) -> list[Prompt]:
    """Return the prompts of a split, with the system prompt, not rendered."""
    data = config.data
    files, most = split_files(config, split)
    sets = load_sets(
        files, prompt_key=data.prompt_key, source_key=data.reward_fn_key, max_samples=most
    )
    found = [
        prompt_of(f"{split}:{label}", row)
        for rows, label in zip(sets, unique_labels(sets), strict=True)
        for row in rows.rows
    ]
    return [_with_system(prompt, data.system_prompt) for prompt in found]


def _with_system(prompt: Prompt, system: str | None) -> Prompt:
    if system is None or prompt.messages[0]["role"] in ("system", "developer"):
        return prompt
    return replace(prompt, messages=({"role": "system", "content": system}, *prompt.messages))


def _row(prompt: Prompt, split: str, index: int) -> dict[str, Any]:
    truth = "" if prompt.ground_truth is None else str(prompt.ground_truth)
    return {
        "data_source": prompt.data_source,
        "prompt": [{"role": m["role"], "content": m["content"]} for m in prompt.messages],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": split, ROW: row_of(prompt, split)},
    }


def shown(files: Iterable[Path], nodes: int) -> list[str]:
    """Say what was written, and how it is started."""
    folder = next(iter(files)).parent
    first = shlex.quote(str(folder / "node_0.sh"))
    others = f", and MASTER_ADDR=HOST {folder}/node_1.sh to node_{nodes - 1}.sh on the others"
    return [
        f"Wrote {folder}: overrides, reward.py, data/, node_0.sh" + (" …" if nodes > 1 else ""),
        f"Start it where verl {VERSION} is installed: bash {first}"
        + (f" on the first node{others if nodes > 1 else ''}" if nodes > 1 else ""),
    ]


def missing_verl(has: Sequence[str]) -> str | None:
    """Say how to install what is missing of verl; `has` are the packages that are there."""
    missing = [name for name in ("verl", "vllm") if name not in has]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here. In an "
        f"environment of its own: pip install -r {shlex.quote(str(REQUIREMENTS))}, and ppo-cli "
        "with pip install --no-deps."
    )
