#!/usr/bin/env bash
# Runs on the host of mpirun (Open MPI, MPICH, Intel MPI). The ranks are mpirun's; nothing of MPI itself is used.
#   deploy/mpirun.sh gpt2-124m /shared/runs/gpt2 -n 8
#   deploy/mpirun.sh gpt2-124m /shared/runs/gpt2 -n 16 --hostfile hosts -x MASTER_ADDR=node0 -x MASTER_PORT=29500
# Options behind the run folder are mpirun's. A run that failed is started again at most RESTARTS (10) times.
# Exit code 75: saved after a signal; start it again to go on.
set -u
recipe=$1
run=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
if ! mkdir -p "$run" || [ ! -w "$run" ]; then
  echo "error: user $(id -u) cannot write to $run: name another folder, or give it to that user" >&2
  exit 2
fi
mark=$run/.stopped-$(hostname)-$$
case $(mpirun --version 2>&1) in # what mpirun passes on to the ranks; Open MPI kills them after SIGTERM
  *"Open MPI"*) stop=USR1 ;;
  *) stop=TERM ;;
esac

mpi=
stopped=
trap 'stopped=1; [ -z "$mpi" ] || kill -"$stop" "$mpi" 2>/dev/null' TERM INT
for ((start = 0; start <= ${RESTARTS:-10}; start++)); do
  rm -f "$mark" "$mark-user"
  mpirun "$@" "$here/rank.sh" "$mark" fivefold train "$recipe" --out "$run" --resume-from auto &
  mpi=$!
  [ -z "$stopped" ] || kill -"$stop" "$mpi" 2>/dev/null # it came before mpirun was there
  wait "$mpi"
  code=$?
  while kill -0 "$mpi" 2>/dev/null; do # a signal ended the wait, not mpirun
    wait "$mpi"
    code=$?
  done
  if [ -e "$mark" ] && [ "$code" -ne 0 ]; then code=75; fi
  if [ -e "$mark-user" ]; then code=2; fi
  rm -f "$mark" "$mark-user"
  case $code in 0 | 2 | 75 | 126 | 127) break ;; esac # 127: no such program
  [ -z "$stopped" ] || break # it was to stop, and could not save
done
exit "$code"
