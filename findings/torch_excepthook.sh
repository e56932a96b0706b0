#!/bin/sh
# PyTorch changes sys.excepthook in init_process_group, and destroy_process_group does not change it back.
#
# Guess: after destroy_process_group a process is as it was before init_process_group, so an uncaught error is printed as
# Python prints it.
# Versions: torch 2.13.0, Python 3.11.7, Linux, CPU only.
# Behaviour: init_process_group wraps sys.excepthook, so that each line of an uncaught error begins with "[rankN]: ".
# destroy_process_group leaves the wrapper. A second init_process_group wraps it again: the lines then begin with the
# prefix twice, once more for each group of all ranks that the process has had. Nothing in the documentation of either
# function says so.
# Output seen: "restored: False" and "prefixes: 2".
# Here: a process that trains twice, or that reports an error after training, prints tracebacks that begin with the rank
# several times. Readers of logs must not take the number of prefixes as given.
#
# Exits with 1 if PyTorch does something else.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/hook.py" <<'EOF'
import contextlib, io, sys

import torch.distributed as dist

folder, before = sys.argv[1], sys.excepthook
for number in range(2):
    store = dist.FileStore(f"{folder}/store-{number}", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()
said = io.StringIO()
with contextlib.redirect_stderr(said):
    error = ValueError("as an uncaught error is printed")
    sys.excepthook(type(error), error, None)
restored, prefixes = sys.excepthook is before, said.getvalue().count("[rank0]: ")
print(f"restored: {restored}\nprefixes: {prefixes}")
sys.exit(restored or prefixes != 2)
EOF
GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/python" "$folder/hook.py" "$folder"
