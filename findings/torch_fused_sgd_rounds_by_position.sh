#!/usr/bin/env bash
# Guess: SGD updates each number by itself, so a number's new value does not depend on how long its tensor is: the
# beginning of a vector, updated alone, has the bits that it has in the whole vector. Sharded optimizers rely on it.
# Versions: torch 2.13.0 (CPU build), Python 3.11, Linux, x86-64 with AVX2 or AVX-512.
# Behaviour: the fused kernel of torch.optim.SGD updates eight numbers and more at once, and the last few of a tensor
# whose length is no multiple of eight by other instructions, which round otherwise. So in fp32 some of these numbers
# differ in their last bit from the same numbers in a longer tensor. With ATEN_CPU_CAPABILITY=default none does, and
# none does with foreach instead of fused.
# Output seen:
#   fused: the last 7 numbers differ in some of 100 tensors, numbers before them in 0
#   fused, ATEN_CPU_CAPABILITY=default: the last 7 numbers differ in 0 of 100 tensors, numbers before them in 0
#   foreach: the last 7 numbers differ in 0 of 100 tensors, numbers before them in 0
# Exits with 0 while this is so, and with 1 if it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$place"
cat > program.py <<'PROGRAM'
import sys

import torch

torch.set_num_threads(1)


def updated(weight, gradient, velocity):
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1, **{sys.argv[1]: True})
    optimizer.state[parameter]["momentum_buffer"] = velocity.clone()
    parameter.grad = gradient.clone()
    optimizer.step()
    return parameter.detach()


torch.manual_seed(0)
ends = others = 0
for _ in range(100):
    tensors = torch.randn(3, 64)
    whole, part = updated(*tensors)[:47], updated(*tensors[:, :47])
    ends += bool((whole != part)[40:].any())
    others += bool((whole != part)[:40].any())
how = "0 of 100" if ends == 0 else "some of 100"
print(f"the last 7 numbers differ in {how} tensors, numbers before them in {others}")
PROGRAM
seen=$("$place/venv/bin/python" program.py fused)
plain=$(ATEN_CPU_CAPABILITY=default "$place/venv/bin/python" program.py fused)
foreach=$("$place/venv/bin/python" program.py foreach)
printf 'fused: %s\nfused, ATEN_CPU_CAPABILITY=default: %s\nforeach: %s\n' "$seen" "$plain" "$foreach"
test "$seen" = "the last 7 numbers differ in some of 100 tensors, numbers before them in 0"
test "$plain" = "the last 7 numbers differ in 0 of 100 tensors, numbers before them in 0"
test "$foreach" = "the last 7 numbers differ in 0 of 100 tensors, numbers before them in 0"
