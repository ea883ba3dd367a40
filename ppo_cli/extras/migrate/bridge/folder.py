"""Write the folder that verl runs from: overrides, a script per node, reward file, rows, settings.

The folder is also the run folder: verl's logs are read back into it (see rewards.py).
All nodes must see it at the same path.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.mixture import judges_of, models_of, other_judges
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config, Data, Trainer
from ppo_cli.data_sets.prompts import unique_labels
from ppo_cli.data_sets.row_sets import load_sets
from ppo_cli.data_sets.rows import prompt_of
from ppo_cli.errors import ConfigError, collect_problems
from ppo_cli.extras.migrate.bridge.overrides import TRAIN, VAL, VERSION, VerlOverrides
from ppo_cli.extras.migrate.bridge.rewards import KEYS_FILE, ROW, STOPPED, encode_row
from ppo_cli.planning.batches import DataSplit, describe_missing_rows, split_files
from ppo_cli.planning.config_file import config_yaml
from ppo_cli.planning.resolved import Resolved
from ppo_cli.records import Prompt
from ppo_cli.run_folder.folder import RunFolder
from ppo_cli.scoring.sources import row_checks

RAY_WITH_TOKENS = "2.60"  # earlier versions ignore RAY_AUTH_MODE
# Variables that boto3 reads, for judges whose requests it signs.
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# The file that verl loads its reward function from; the function is in rewards.py next to this.
REWARD = '''\
"""Scores responses for verl by the settings in config.yaml next to this file."""

from pathlib import Path

from ppo_cli.extras.migrate.bridge.rewards import reward_function

compute_score = reward_function(Path(__file__).resolve().parent, {where!r})
'''
# The start of every node's script. Values in single braces are filled in by `node_scripts`.
HEAD = """\
#!/usr/bin/env bash
# {what}
# Python is ${{PYTHON:-python}}: it needs verl {version}, its engines, Ray {ray} and ppo-cli.
set -u
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
python=${{PYTHON:-python}}
address={address}
port=${{MASTER_PORT:-{port}}}
patience=${{NODE_TIMEOUT:-{patience}}}  # seconds to wait for other nodes
keys=({keys})
token=$here/{token}
"""
# Only the reward server gets the keys of judges: all Ray processes inherit Ray's environment.
# The lock keeps a second start from replacing and deleting the secrets of the first.
KEYS_TO_FILE = """\
exec 9> "$here/.lock"
flock -n 9 || {{
    echo "The script of node 0 is already running in $here: wait for it, or stop it." >&2
    exit 2
}}
rm -f "$here/{keys_file}"
for name in "${{keys[@]}}"; do
    [ -z "${{!name:-}}" ] || (umask 077; printf '%s\\n' "$name=${{!name}}" >> "$here/{keys_file}")
done
trap 'rm -f "$here/{keys_file}"' EXIT
"""
# All users can read Ray's folder, so it is inside one that only this user can enter. The reaper
# ends Ray's processes, and no others, when it gets a signal or when this script has exited.
RAY = """\
for name in "${{keys[@]}}"; do unset "$name"; done
root=${{TMPDIR:-/tmp}}
[ "${{#root}}" -le 20 ] || root=/tmp
ray=""
start_ray() {{
    setsid "$python" -P -m ppo_cli.processes.reaper $$ "$temp" \\
        "$python" -P -m ray.scripts.scripts start \\
        --block --disable-usage-stats --temp-dir="$temp/r" "$@" > "$temp/log" 2>&1 &
    ray=$!
}}
runs() {{ kill -0 "$ray" 2>/dev/null; }}
end_ray() {{
    [ -z "$ray" ] || kill "$ray" 2>/dev/null
    [ -z "$ray" ] || wait "$ray"
    rm -rf "$temp"
}}
open_ray_folder() {{
    temp=$(mktemp -d "$root/ppo-ray-XXXXXXXX") || exit 1
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    "$python" -P -c 'import sys; from importlib.metadata import version as v
sys.exit(tuple(map(int, v("ray").split(".")[:2])) < ({ray_numbers}))' || {{
        echo "$python has no Ray {ray} or later, and earlier versions let anybody join:" \\
            "$python -m pip install 'ray>={ray}'" >&2
        rm -rf "$temp"
        exit 2
    }}
    if [ -n "${{RAY_AUTH_TOKEN:-}}" ]; then
        token=$temp/token
        (umask 077; printf '%s' "$RAY_AUTH_TOKEN" > "$token")
        unset RAY_AUTH_TOKEN
    fi
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"
    export RAY_gcs_rpc_server_reconnect_timeout_s=20{alone}
}}
"""
# With this variable Ray uses 127.0.0.1 as this machine's address, and only listens there.
ALONE = """
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"""
# Node 0: start Ray unless RAY_ADDRESS names one, wait for all nodes, train, then read the results
# back. A file `stopped` is the reward server's request to end the run.
FIRST = """\
rm -f "$here/{stopped}"
mkdir -p "$here/verl"
if [ -z "${{RAY_ADDRESS:-}}" ]; then
    open_ray_folder
    trap 'end_ray; rm -f "$here/{token}" "$here/{keys_file}"' EXIT
    rm -f "$here/{token}"
    [ -e "$token" ] || (umask 077; "$python" -P -c 'import secrets
print(secrets.token_hex(32), end="")' > "$token")
    client=$("$python" -P -c 'import socket; door = socket.create_server(("127.0.0.1", 0))
print(door.getsockname()[1])')
    start_ray --head --node-ip-address="$address" --port="$port" --include-dashboard=false \\
        --dashboard-agent-listen-port=0 --ray-client-server-port="$client"
    export RAY_ADDRESS="$address:$port"
fi
joined() {{
    "$python" -c 'import ray; ray.init("auto", logging_level=40, log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null | tail -n 1
}}
ends=$((SECONDS + patience))
until [ "$(joined)" -ge {nodes} ] 2>/dev/null; do
    if [ -n "$ray" ] && ! runs; then
        tail -n 8 "$temp/log" >&2
        echo "Ray did not start at $address:$port. MASTER_PORT names another port." >&2
        exit 1
    fi
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
# Other nodes: try to join until node 0 has started Ray's head, then run until it ends.
OTHER = """\
open_ray_folder
trap end_ray EXIT
ends=$((SECONDS + patience))
until grep -q "Ray runtime started" "$temp/log" 2>/dev/null; do
    runs || start_ray --address="$address:$port" --dashboard-agent-listen-port=0
    sleep 2
    if [ "$SECONDS" -ge "$ends" ] && ! grep -q "Ray runtime started" "$temp/log"; then
        tail -n 8 "$temp/log" >&2
        echo "After $patience s there is no Ray head to join at $address:$port. Start node_0.sh" \\
            "there, or set MASTER_ADDR and NODE_TIMEOUT." >&2
        exit 3
    fi
done
wait "$ray"
exit 0
"""


def write_folder(folder: Path, resolved: Resolved, bridged: VerlOverrides) -> list[Path]:
    """Write all files that verl needs and return their paths; rows are read as for training."""
    config = resolved.config
    folder = folder.resolve()
    # Read and check the rows first: nothing is written for a bad file.
    prompts = {TRAIN: load_prompts(config.data, "train")}
    if config.data.val_files:
        prompts[VAL] = load_prompts(config.data, "val")
    check_rows(config, prompts)
    RunFolder(folder, "--out").prepare()
    (folder / "data").mkdir(exist_ok=True)
    for name, rows in prompts.items():
        write_rows(folder / name, rows, Path(name).stem)
    # The node scripts come last: a folder with a script has everything else.
    texts = {
        "config.yaml": config_yaml(resolved, resolved.config, resolved.why),
        "overrides": "".join(f"{line}\n" for line in bridged.lines(folder)),
        "reward.py": REWARD.format(where=str(Path.cwd())),
        **node_scripts(config.trainer, config.reward),
    }
    for name, text in texts.items():
        with atomic_replace(folder / name) as fresh:
            fresh.write_text(text, encoding="utf-8")
            fresh.chmod(0o755 if name.endswith(".sh") else 0o644)
    return [folder / name for name in (*texts, *prompts)]


def check_rows(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> None:
    """Raise ConfigError if there are too few rows, or if they lack what the reward needs."""
    mini, count = config.actor.ppo_mini_batch_size, len(prompts[TRAIN])
    problem = describe_missing_rows(config.data, mini, count)
    problems = [problem] if problem else []
    rows = [prompt for prompts_of_split in prompts.values() for prompt in prompts_of_split]
    problems += collect_problems(row_checks(config.reward, rows, all_known=True))
    if problems:
        raise ConfigError(problems)


def node_scripts(trainer: Trainer, reward: Reward) -> dict[str, str]:
    """Return the script of each node; node 0 starts Ray's head, waits for the others and trains."""
    alone = trainer.nnodes == 1
    # Several nodes need an address that all can reach; the script's user must give one if the
    # settings do not.
    needed = '"${MASTER_ADDR:?set MASTER_ADDR to the address of node 0}"'
    configured = shlex.quote(trainer.master_addr or "127.0.0.1")
    several = f"${{MASTER_ADDR:-{configured}}}" if trainer.master_addr else needed
    # The values of the templates above.
    facts = {
        "address": "127.0.0.1" if alone else several, "alone": ALONE if alone else "",
        "port": trainer.master_port, "patience": trainer.node_timeout, "version": VERSION,
        "nodes": trainer.nnodes, "stopped": STOPPED, "keys_file": KEYS_FILE, "token": ".ray_token",
        "keys": " ".join(key_variables(reward)), "ray": RAY_WITH_TOKENS,
        "ray_numbers": RAY_WITH_TOKENS.replace(".", ", "),
    }  # fmt: skip
    first = "Node 0: starts Ray's head, waits for the other nodes, and trains."
    scripts_by_name = {"node_0.sh": (HEAD + KEYS_TO_FILE + RAY + FIRST).format(what=first, **facts)}
    for rank in range(1, trainer.nnodes):
        what = f"Node {rank}: joins the Ray head of node 0, and runs until that ends."
        scripts_by_name[f"node_{rank}.sh"] = (HEAD + RAY + OTHER).format(what=what, **facts)
    return scripts_by_name


def key_variables(reward: Reward) -> list[str]:
    """Return the variables that may hold a key of a judge or a served reward model."""
    judges = [judge.settings for judge in judges_of(reward)]
    monitors = [judge.monitor for judge in judges]
    judges += [other for judge in judges for other in other_judges(judge)]
    models = [model.settings for model in models_of(reward)]
    named = [*(j.key_env for j in judges), *(m.key_env for m in monitors + models)]
    kinds = {*(judge.type for judge in judges), *(monitor.type for monitor in monitors)}
    signed = AWS_KEYS if any(JUDGES[kind].signs == "boto3" for kind in kinds) else ()
    usual = (name for api in JUDGES.values() for name in api.keys)
    # The providers' usual variables are included: a judge without key_env reads them.
    return sorted({*usual, *signed, *filter(None, named)})


def write_rows(path: Path, prompts: Sequence[Prompt], split: str) -> None:
    """Write prompts as verl's rows; extra_info has everything that scoring needs, as one text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_verl_row(prompt, split, i) for i, prompt in enumerate(prompts)]
    with atomic_replace(path) as fresh:
        pq.write_table(pa.Table.from_pylist(rows), fresh)


def load_prompts(data: Data, split: DataSplit) -> list[Prompt]:
    """Return the prompts of a split with the system prompt, without rendering."""
    files, max_samples = split_files(data, split)
    sets = load_sets(files, **data.keys, max_samples=max_samples)
    prompts = [
        prompt_of(f"{split}:{label}", row)
        for rows, label in zip(sets, unique_labels(sets), strict=True)
        for row in rows.rows
    ]
    return [_add_system_prompt(prompt, data.system_prompt) for prompt in prompts]


def _add_system_prompt(prompt: Prompt, system: str | None) -> Prompt:
    if system is None or prompt.messages[0]["role"] in ("system", "developer"):
        return prompt
    return replace(prompt, messages=({"role": "system", "content": system}, *prompt.messages))


def _verl_row(prompt: Prompt, split: str, index: int) -> dict[str, Any]:
    """Return a prompt as a row of verl's parquet files."""
    truth = "" if prompt.ground_truth is None else str(prompt.ground_truth)
    return {
        "data_source": prompt.data_source,
        # Content and role only: verl's rows have no place for the other fields of a message.
        "prompt": [{"role": m["role"], "content": m["content"]} for m in prompt.messages],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": split, ROW: encode_row(prompt, split)},
    }


def next_steps(files: Iterable[Path], nodes: int) -> list[str]:
    """Return which files were written, and the command that starts training."""
    folder = next(iter(files)).parent
    first = shlex.quote(str(folder / "node_0.sh"))
    others = f", and MASTER_ADDR=HOST {folder}/node_1.sh to node_{nodes - 1}.sh on the others"
    return [
        f"Wrote {folder}: overrides, reward.py, data/, node_0.sh" + (" …" if nodes > 1 else ""),
        f"Start it where verl {VERSION} is installed: bash {first}"
        + (f" on the first node{others if nodes > 1 else ''}" if nodes > 1 else ""),
    ]


def missing_verl(has: Sequence[str]) -> str | None:
    """Return how to install verl and vLLM if missing; `has` are the installed packages."""
    missing = [name for name in ("verl", "vllm") if name not in has]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here. In a "
        f"separate environment: pip install -r {shlex.quote(str(REQUIREMENTS))}, and ppo-cli "
        "with pip install --no-deps."
    )
