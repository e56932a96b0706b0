#!/usr/bin/env bash
# Guess: W&B's folder of an offline run is whole in itself, as `symlink=False` asks for no links.
# Versions: wandb 0.31.0, Python 3.11, Linux.
# Behaviour: wandb's own process writes its log to the user's cache, and puts an absolute link to it into the folder
# of the run (logs/debug-core.log). The setting `symlink` says nothing about this link. Who copies or checks the folder
# of a run meets a link that leads out of it, and one that dangles on another machine.
# Output seen:
#   wandb 0.31.0, symlink=False
#   logs/debug-core.log -> CACHE/wandb/logs/core-debug-TIME.log
#   as guessed: no; the folder has 1 link that leads out of it
# Exits with 0 while this is so, and with 1 if it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check wandb==0.31.0
export HOME="$place/home" XDG_CACHE_HOME="$place/cache" WANDB_MODE=offline
mkdir -p "$HOME" "$XDG_CACHE_HOME"
cd "$place"
"$place/venv/bin/python" - <<'PROGRAM'
import os
import re
import sys
from pathlib import Path

import wandb

run = Path("run").absolute()
run.mkdir()
settings = wandb.Settings(silent=True, console="off", symlink=False)
with wandb.init(project="links", dir=str(run), mode="offline", settings=settings) as one:
    one.log({"loss": 1.0})
print(f"wandb {wandb.__version__}, symlink=False")
links = [path for path in run.rglob("*") if path.is_symlink()]
out = [path for path in links if not path.resolve().is_relative_to(run)]
for path in links:
    target = re.sub(r"\d{8}_\d{6}", "TIME", os.readlink(path)).replace(os.environ["XDG_CACHE_HOME"], "CACHE")
    print("/".join(path.parts[-2:]), "->", target)
print("as guessed:", "no; the folder has" if out else "yes; it has", len(out), "link that leads out of it")
sys.exit(0 if [path.name for path in out] == ["debug-core.log"] else 1)
PROGRAM
