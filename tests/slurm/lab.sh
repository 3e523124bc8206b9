#!/bin/bash
# A throw-away Slurm cluster on one machine: one slurmctld and N slurmd, each "node" in network, UTS, IPC, mount and PID namespaces of its
# own: own host name, address, process list, /dev/shm and Ray folder. The rest of the file system is what a cluster shares.
# In: the variables below. Out: a cluster that answers to `exec`. Nothing is made in the machine's own network, and when the processes end
# all of it is gone. Needs root. Not real here: GPUs, cgroup limits, accounting, containers, PMIx.
#
#   lab.sh install             Debian's packages (skipped when present)
#   lab.sh up                  make the configuration, start everything, wait until all nodes are idle
#   lab.sh exec CMD...         run CMD as on the login node
#   lab.sh node NAME CMD...    run CMD inside a node
#   lab.sh crash NAME          kill a node at once, with all that runs on it
#   lab.sh cut|join NAME       unplug or plug the node's network cable
#   lab.sh boot NAME           start a crashed node again
#   lab.sh down                end only what `up` started
set -euo pipefail

LAB=${SLAB:-/tmp/slurm-lab}     # without characters that a shell or sed would read
N=${SLAB_NODES:-2}
GPUS=${SLAB_GPUS:-0}
CPUS=${SLAB_CPUS:-8}
MEM=${SLAB_MEM:-6000}
SELF=$(readlink -f "$0")
NET=10.77.0                             # lives only inside our own namespaces

die() { echo "lab: $*" >&2; exit 1; }
pid_of() { cat "$LAB/run/$1.nspid" 2>/dev/null || true; }
alive() { local p; p=$(pid_of "$1"); [ -n "$p" ] && kill -0 "$p" 2>/dev/null; }

lab_install() {
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null &&
    command -v munged >/dev/null && command -v sbatch >/dev/null && return 0
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 >/dev/null
}

lab_config() {
  mkdir -p "$LAB"/{etc,state,log,run,munge,dev,spool}
  chmod 700 "$LAB/munge"; chmod 755 "$LAB" "$LAB/run"
  [ -s "$LAB/munge/key" ] || head -c 1024 /dev/urandom > "$LAB/munge/key"
  chmod 600 "$LAB/munge/key"
  # A GRES "File" must be a character or block device, or CUDA_VISIBLE_DEVICES
  # stays empty; a node like /dev/null under another name is enough.
  local i gres=
  [ "$GPUS" = 0 ] || gres=Gres=gpu:$GPUS
  for ((i = 0; i < GPUS; i++)); do
    [ -c "$LAB/dev/nvidia$i" ] || mknod "$LAB/dev/nvidia$i" c 1 3
  done
  sed -e "s#@LAB@#$LAB#g; s#@N@#$N#g; s#@NET@#$NET#g; s#@CPUS@#$CPUS#g" \
      -e "s#@MEM@#$MEM#g; s#@GRES@#$gres#g" \
      "$(dirname "$SELF")/slurm.conf.in" > "$LAB/etc/slurm.conf"
  if [ "$GPUS" -gt 0 ]; then
    echo "NodeName=node[1-$N] Name=gpu File=$LAB/dev/nvidia[0-$((GPUS - 1))] Flags=nvidia_gpu_env"
  fi > "$LAB/etc/gres.conf"
  {
    echo "127.0.0.1 localhost"
    echo "$NET.254 ctl"
    for ((i = 1; i <= N; i++)); do echo "$NET.$i node$i"; done
  } > "$LAB/etc/hosts"
}

# Runs as PID 1 of a new set of namespaces.
lab_init() {
  local name=$1 i
  hostname "$name"
  mount --bind "$LAB/etc/hosts" /etc/hosts
  mkdir -p /etc/slurm && mount --bind "$LAB/etc" /etc/slurm
  mount -t tmpfs -o size=10g tmpfs /dev/shm
  mkdir -p "$LAB/local/$name/ray" /tmp/ray && mount --bind "$LAB/local/$name/ray" /tmp/ray
  ip link set lo up
  if [ "$name" = ctl ]; then
    ip link add br0 type bridge
    ip addr add $NET.254/24 dev br0
    ip link set br0 up
    munged --key-file="$LAB/munge/key" --socket="$LAB/run/munge.socket" \
      --pid-file="$LAB/run/munged.pid" --log-file="$LAB/log/munged.log" \
      --seed-file="$LAB/munge/seed"
    touch "$LAB/run/$name.ready"
    slurmctld -D -c </dev/null >>"$LAB/log/ctl.out" 2>&1 &
  else
    for ((i = 0; i < 100; i++)); do      # the outside moves our cable in
      ip link show eth0 >/dev/null 2>&1 && break
      sleep 0.05
    done
    ip addr add "$NET.${name#node}/24" dev eth0
    ip link set eth0 up
    slurmd -D -N "$name" </dev/null >>"$LAB/log/$name.out" 2>&1 &
  fi
  wait $! || true                        # bash as PID 1 also reaps orphans
}

start_ns() {
  local name=$1 i p=
  rm -f "$LAB/run/$name.nspid" "$LAB/run/$name.ready"
  # A new session, and no inherited descriptors, so that a caller's pipe closes.
  setsid env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 HOME=/root SLAB="$LAB" SLAB_NODES="$N" \
    unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc \
    bash "$SELF" _init "$name" </dev/null >"$LAB/log/$name.init" 2>&1 &
  local up=$!
  for ((i = 0; i < 100; i++)); do        # unshare's only child is the ns's PID 1
    p=$(tr -d ' ' <"/proc/$up/task/$up/children" 2>/dev/null) || true
    [ -n "$p" ] && break
    sleep 0.05
  done
  [ -n "$p" ] || { cat "$LAB/log/$name.init" >&2; die "no namespace for $name"; }
  echo "$p" > "$LAB/run/$name.nspid"
}

start_node() {
  local name=$1 ctl p
  ctl=$(pid_of ctl)
  start_ns "$name"; p=$(pid_of "$name")
  # Both ends are born inside our namespaces.
  nsenter -t "$ctl" -n ip link add "v$name" type veth peer name eth0 netns "$p"
  nsenter -t "$ctl" -n ip link set "v$name" master br0 up
}

lab_exec() { exec nsenter -t "$(pid_of ctl)" -n -u -i -m --wd="$PWD" "$@"; }

lab_up() {
  ! alive ctl || die "already up in $LAB"
  rm -rf "${LAB:?}"/{state,spool,log,run,local}   # what an earlier cluster in this folder left
  lab_config
  local i
  trap '[ $? = 0 ] || lab_down' EXIT
  start_ns ctl
  for ((i = 0; i < 100; i++)); do [ -e "$LAB/run/ctl.ready" ] && break; sleep 0.05; done
  [ -e "$LAB/run/ctl.ready" ] || { cat "$LAB/log/ctl.init" >&2; die "ctl did not start"; }
  for ((i = 1; i <= N; i++)); do start_node "node$i"; done
  for ((i = 0; i < 120; i++)); do
    [ "$( (lab_exec sinfo -h -N -t idle -o %N) 2>/dev/null | sort -u | wc -l)" = "$N" ] && return 0
    sleep 0.25
  done
  (lab_exec sinfo -N -l) >&2 || true
  tail -n 20 "$LAB"/log/*.log "$LAB"/log/*.init >&2
  die "nodes are not idle"
}

lab_down() {
  local f name p
  for f in "$LAB"/run/node*.nspid "$LAB"/run/ctl.nspid; do
    [ -e "$f" ] || continue
    name=$(basename "$f" .nspid); p=$(cat "$f")
    # PID 1 of the namespace: the kernel ends the rest with it. Check that the
    # number is still ours, since pids are used again.
    if tr '\0' ' ' < "/proc/$p/cmdline" 2>/dev/null | grep -q "_init $name"; then kill -9 "$p"; fi
    rm -f "$f"
  done
}

cmd=${1:-}; shift || true
case $cmd in
  install) lab_install ;;
  up) lab_up ;;
  _init) lab_init "$1" ;;
  exec) lab_exec "$@" ;;
  node) n=$1; shift; exec nsenter -t "$(pid_of "$n")" -n -u -i -m -p --wd="$PWD" "$@" ;;
  crash) kill -9 "$(pid_of "$1")"; rm -f "$LAB/run/$1.nspid" ;;
  boot) ! alive "$1" || die "$1 runs"; start_node "$1" ;;
  cut) nsenter -t "$(pid_of ctl)" -n ip link set "v$1" down ;;
  join) nsenter -t "$(pid_of ctl)" -n ip link set "v$1" up ;;
  down) lab_down ;;
  *) sed -n '2,/^set -e/p' "$SELF" | grep '^#' >&2; exit 2 ;;
esac
