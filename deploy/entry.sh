#!/usr/bin/env bash
# The image's entry point: entry.sh train quickstart --out /runs/first, or entry.sh /opt/fivefold/deploy/torchrun.sh ...
# Started as root, as docker does, it becomes the owner of the mounted folder, so that its files are theirs. Docker makes
# a missing folder as root: that one is given to the image's own user. Started as another user it stays that user.
set -eu
runs=${RUNS:-/runs}
trainer=1000
read -r _ outside _ </proc/self/uid_map
if [ "$(id -u)" -eq 0 ] && [ "$outside" -eq 0 ]; then # in a rootless engine root is who has started it: it stays root
  user=$(stat -c %u "$runs") group=$(stat -c %g "$runs")
  if [ "$user" -eq 0 ]; then
    user=$trainer group=$trainer
    chown "$user:$group" "$runs" 2>/dev/null || true # said below
  fi
  exec setpriv --reuid "$user" --regid "$group" --clear-groups "$0" "$@"
fi

export USER="${USER:-trainer}" LOGNAME="${LOGNAME:-trainer}" # this user may have no name in the image
[ -w "${HOME:-/}" ] || export HOME=/tmp
if [ ! -w "$runs" ]; then
  needed=""
  case " $* " in
    *" $runs"* | *"=$runs"*) needed=yes ;;
    *" --out"*) ;; # it goes elsewhere
    *" train "*) needed=yes ;;
  esac
  if [ "$needed" ]; then
    echo "error: user $(id -u) cannot write to $runs, which belongs to user $(stat -c %u "$runs"). Leave out --user, or" \
      "give the folder to that user: chown $(id -u) FOLDER on the host, fsGroup in Kubernetes" >&2
    exit 2
  fi
  FIVEFOLD_CACHE=$(mktemp -d) # for what writes nothing there, such as plan
  export FIVEFOLD_CACHE
fi
case ${1:-} in
  /*) exec "$@" ;;
  *) exec fivefold "$@" ;;
esac
