#!/bin/bash
# What runs on one node, started by launch/job.sh as a job step, inside the container where there is one.
#   node.sh preflight PORT NOW           what this node lacks, a FAIL line each; exit code 42
#   node.sh ray head|worker PORT RUN     this node's part of Ray, until TERM; its head is at $GPTOSS_HEAD
#   node.sh driver PORT VERB ...         gptoss VERB, in that Ray
#   node.sh alone VERB ...               gptoss VERB
set -u
me=$(hostname -s)
export PYTHONUNBUFFERED=1
[ -z "${GPTOSS_VENV:-}" ] || PATH=$GPTOSS_VENV/bin:$PATH
# Slurm describes the step that Ray was started in, not the rank or engine that Ray starts later; Megatron reads such variables.
job=$SLURM_JOB_ID cpus=${SLURM_CPUS_ON_NODE:-1} num_nodes=${SLURM_JOB_NUM_NODES:-1}
for name in ${!SLURM_@} ${!SLURMD_@} ${!SRUN_@} ${!SBATCH_@} ${!PMI_@} ${!PMIX_@}; do unset "$name"; done

address() {  # of this node, as the others reach it. Not by `ip`, which an image may lack
  if [ -n "${GPTOSS_INTERFACE:-}" ]; then
    python -c 'import psutil, sys; print(next(a.address for a in psutil.net_if_addrs()[sys.argv[1]] if a.family == 2))' "$GPTOSS_INTERFACE"
  else
    getent ahostsv4 "$me" | awk '{print $1; exit}'
  fi
}
num_gpus() { tr ',' '\n' <<<"${CUDA_VISIBLE_DEVICES:-}" | grep -c . ; }
if [ -n "${GPTOSS_INTERFACE:-}" ]; then export NCCL_SOCKET_IFNAME=$GPTOSS_INTERFACE GLOO_SOCKET_IFNAME=$GPTOSS_INTERFACE; fi

preflight() {
  local port=$1 now=$2 bad=0 mount skew interfaces=(/sys/class/net/*)
  fail() { echo "FAIL $me: $*"; bad=42; }
  for mount in ${GPTOSS_MOUNTS:-}; do [ -d "$mount" ] || fail "$mount (GPTOSS_MOUNTS) is not there"; done
  [ -w "$GPTOSS_RUNS" ] || fail "$GPTOSS_RUNS (GPTOSS_RUNS) is not there, or cannot be written to"
  [ -w "$GPTOSS_LOCAL_TMP" ] || fail "$GPTOSS_LOCAL_TMP (GPTOSS_LOCAL_TMP) is not there, or cannot be written to"
  if ! command -v gptoss >/dev/null; then fail "no gptoss on this node (GPTOSS_VENV = ${GPTOSS_VENV:-empty}; PATH = $PATH)"
  elif ! gptoss --version >/dev/null 2>&1; then fail "gptoss does not start here: $(gptoss --version 2>&1 | tail -n 1)"; fi
  [ -z "${GPTOSS_INTERFACE:-}" ] || [ -n "$(address 2>/dev/null)" ] ||
    fail "no address on the interface $GPTOSS_INTERFACE (GPTOSS_INTERFACE). There are: ${interfaces[*]##*/}"
  # Debian's own /etc/hosts gives a host's name such an address.
  [ "$num_nodes" = 1 ] || [[ $(address 2>/dev/null) != 127.* ]] ||
    fail "its name stands for $(address), where no other node finds it. Set GPTOSS_INTERFACE. There are: ${interfaces[*]##*/}"
  skew=$(($(date +%s) - now))
  [ "${skew#-}" -le 60 ] || fail "its clock differs by $skew s from that of the first node"
  if [ "$port" != 0 ] && { answers 127.0.0.1 "$port" || answers "$GPTOSS_HEAD" "$port"; }; then
    fail "port $port is in use. Set GPTOSS_PORT to a free one, or to 0 for one that follows from the job's number"
  fi
  return "$bad"
}

answers() { (: <"/dev/tcp/$1/$2") 2>/dev/null; }  # address port

wait_for_head() {  # port
  local i
  for ((i = 0; i < 240; i++)); do
    ! answers "$GPTOSS_HEAD" "$1" || return 0
    sleep 0.5
  done
  echo "no Ray head answers at $GPTOSS_HEAD:$1 after 120 s, seen from $me"
  return 1
}

# TERM reaches Ray too, which ends its own processes; bash waits for it, ends what is left, and cleans up. Of what Ray wrote its logs are kept.
ray_node() {
  local role=$1 port=$2 run=$3 tmp=$GPTOSS_LOCAL_TMP/gptoss-$job where own rc keeper
  trap : TERM
  trap '' USR1
  own=$(address)
  rm -rf "$tmp"   # of an earlier start of this job, if the node went down in it
  if [ "$role" = head ]; then where=(--head --port="$port" --include-dashboard=false)
  else where=(--address="$GPTOSS_HEAD:$port"); wait_for_head "$port" || exit 1; fi
  [ "${GPTOSS_OBJECT_STORE:-0}" = 0 ] || where+=(--object-store-memory="$GPTOSS_OBJECT_STORE")
  echo "$(date +%T) Ray on $me ($own): ${where[*]}, $cpus CPUs, $(num_gpus) GPUs"
  export RAY_worker_niceness=${RAY_worker_niceness:-0}  # see loop/ray_start.py
  # Where the head is lost the raylet ends, but its agents wait for the head for minutes, and Slurm may have lost sight of them.
  exec 9> >(trap '' TERM USR1; exec python -m megatron_gptoss.loop.orphans $$)
  keeper=$!
  ray start "${where[@]}" --node-ip-address="$own" --num-cpus="$cpus" --num-gpus="$(num_gpus)" --temp-dir="$tmp" --block 9>&-
  rc=$?
  trap '' PIPE
  echo now >&9
  exec 9>&-
  wait "$keeper"
  mkdir -p "$GPTOSS_RUNS/launch-$run/ray-$me"
  cp "$tmp"/session_2*/logs/{raylet,gcs_server}.{out,err} "$GPTOSS_RUNS/launch-$run/ray-$me/" 2>/dev/null
  rm -rf "$tmp"
  return "$rc"
}

what=$1; shift
case $what in
  preflight) preflight "$@" ;;
  ray) ray_node "$@" ;;
  driver)
    wait_for_head "$1" || exit 1
    export RAY_ADDRESS=$GPTOSS_HEAD:$1
    export CUDA_VISIBLE_DEVICES=''    # the driver computes nothing
    shift
    exec gptoss "$@" ;;
  alone) exec gptoss "$@" ;;
esac
