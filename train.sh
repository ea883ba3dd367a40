#!/usr/bin/env bash
# Trains: ./train.sh ARGS sets the environment up once (.venv) and runs `ppo train ARGS`.
# Paths in ARGS count from the folder that you are in, not from this one.
set -euo pipefail

self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do
    target=$(readlink "$self")
    case $target in /*) self=$target ;; *) self=$(dirname -- "$self")/$target ;; esac
done
root=$(CDPATH='' cd -- "$(dirname -- "$self")" && pwd -P)

"$root/scripts/setup" run
ppo=${PPO_VENV:-$root/.venv}/bin/ppo
# What the resume command of a run that stopped early begins with.
PPO_COMMAND=$(printf %q "$ppo")
export PPO_COMMAND
# A Ctrl-C while Python starts would print a traceback: it waits until `ppo` takes it.
hold=()
env --block-signal=INT true 2>/dev/null && hold=(env --block-signal=INT)
exec ${hold[@]+"${hold[@]}"} "$ppo" train "$@"
