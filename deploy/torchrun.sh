#!/usr/bin/env bash
# Runs on each host. torchrun starts all ranks again when one dies, at most ten times.
#   HOSTS=2 RENDEZVOUS=node0:29500 GLOO_SOCKET_IFNAME=eth0 deploy/torchrun.sh gpt2-124m /shared/runs/gpt2
# HOSTS, RANKS (per host) and RENDEZVOUS default to what Kubeflow sets for torchrun (PET_...).
# GRACE: seconds to finish a step and save after a signal. Exit code 75: saved after a signal; start it again to go on.
# RETRY: another code for that, for launchers that have a table of their own.
set -u
recipe=${1:-gpt2-124m}
run=${2:-/shared/runs/gpt2}
here=$(cd "$(dirname "$0")" && pwd)
if ! mkdir -p "$run" || [ ! -w "$run" ]; then
  echo "error: user $(id -u) cannot write to $run: name another folder, or give it to that user" >&2
  exit 2
fi
mark=$run/.stopped-$(hostname)-$$
rm -f "$mark"

torchrun --nnodes "${HOSTS:-${PET_NNODES:-1}}" --nproc-per-node "${RANKS:-${PET_NPROC_PER_NODE:-8}}" \
  --max-restarts "${PET_MAX_RESTARTS:-10}" --shutdown-timeout "${GRACE:-100}" \
  --rdzv-backend c10d --rdzv-endpoint "${RENDEZVOUS:-${PET_RDZV_ENDPOINT:-${PET_MASTER_ADDR:-localhost}:${PET_MASTER_PORT:-29500}}}" \
  --no-python "$here/rank.sh" "$mark" fivefold train "$recipe" --out "$run" --resume-from auto &
agent=$!
trap 'kill -TERM "$agent" 2>/dev/null' TERM INT
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do
  wait "$agent"
  code=$?
done

if [ -e "$mark" ] && [ "$code" -ne 0 ]; then
  rm -f "$mark"
  exit "${RETRY:-75}"
fi
if [ -e "$mark-user" ]; then code=2; fi
rm -f "$mark" "$mark-user"
exit "$code"
