#!/usr/bin/env bash
# rank.sh MARK COMMAND...: runs one rank. Makes the file MARK if the rank has saved and left (75), and MARK-user after an
# error of the user (2), because a launcher may hide its exit code.
set -u
mark=$1
shift
trap '' USR1 # Open MPI sends it to the rank, too, which would die of it
"$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT USR1
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the rank
  wait "$child"
  code=$?
done
if [ "$code" -eq 75 ]; then touch "$mark"; fi
if [ "$code" -eq 2 ]; then touch "$mark-user"; fi
exit "$code"
