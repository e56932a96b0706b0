#!/usr/bin/env bash
# Guess: a program that ends with `sys.exit(not well)` ends as it does without W&B: True is an int, and Python's exit
# code is 1.
# Versions: wandb 0.31.0, protobuf 6 or 7, Python 3.11, Linux.
# Behaviour: W&B's hook keeps the value as it is given and puts it into a message of protobuf, which takes no booleans.
# At exit it raises TypeError, also where run.finish() was called before. The exit code is still right. With
# `sys.exit(1)` nothing is raised.
# Output seen:
#   sys.exit(True): exit code 1, TypeError: ... Expected an int, got a boolean.
#   sys.exit(1): exit code 1, no error
# Exits with 0 while this is so, and with 1 if it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check wandb==0.31.0
export HOME="$place/home" XDG_CACHE_HOME="$place/cache" WANDB_MODE=offline
mkdir -p "$HOME" "$XDG_CACHE_HOME"
cd "$place"
cat > program.py <<'PROGRAM'
import sys

import wandb

run = wandb.init(project="p", settings=wandb.Settings(silent=True, console="off"))
run.log({"loss": 1.0})
run.finish()
sys.exit(True if sys.argv[1] == "True" else 1)
PROGRAM
ends() {
  local code=0
  "$place/venv/bin/python" program.py "$1" 2> errors || code=$?
  printf 'sys.exit(%s): exit code %s, %s\n' "$1" "$code" "$(grep '^TypeError' errors || echo 'no error')"
}
seen=$(ends True; ends 1)
printf '%s\n' "$seen"
grep -q '^sys.exit(True): exit code 1, TypeError: .*Expected an int, got a boolean' <<< "$seen"
grep -q '^sys.exit(1): exit code 1, no error$' <<< "$seen"
