# What happens between Slurm's allocation and the job's exit code. Sourced by the *.sbatch files; reads launch/site.env; runs launch/node.sh
# on the nodes. It starts job steps and nothing else, so Slurm knows all that it started, and ends it.
# Exit codes: the driver's; 2 is a mistake that a restart would not mend; 143 killed from outside; 1 the rest.
# shellcheck shell=bash
set -uo pipefail
say() { echo "$(date +%T) [job] $*"; }
die() { say "$*"; exit 2; }

GPTOSS_HOME=${GPTOSS_HOME:-$SLURM_SUBMIT_DIR}
site=${GPTOSS_SITE:-$GPTOSS_HOME/launch/site.env}
[ -r "$site" ] || die "no site settings: $site cannot be read. Copy launch/site.env.example to it, or set GPTOSS_SITE to your own file."
set -a
# shellcheck source=launch/site.env.example
. "$site"
set +a
export GPTOSS_HOME GPTOSS_RUNS=${GPTOSS_RUNS:-runs} GPTOSS_LOCAL_TMP=${GPTOSS_LOCAL_TMP:-/tmp}

# The batch script runs on the first node, so this is the address of Ray's head.
if [ -n "${GPTOSS_INTERFACE:-}" ]; then
  GPTOSS_HEAD=$(ip -4 -o addr show dev "$GPTOSS_INTERFACE" 2>/dev/null | awk '{split($4, a, "/"); print a[1]; exit}')
else
  GPTOSS_HEAD=$(getent ahostsv4 "$(hostname -s)" | awk '{print $1; exit}')
fi
export GPTOSS_HEAD
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
restart=${SLURM_RESTART_COUNT:-0}
run_id=${GPTOSS_RUN_ID:-$SLURM_JOB_ID}
logs=$GPTOSS_RUNS/launch-$run_id
mkdir -p "$logs" || die "GPTOSS_RUNS = $GPTOSS_RUNS ($site) cannot be written to from $head."

container=() inside=() list=
case ${GPTOSS_CONTAINER:-none} in
  none) ;;
  apptainer | pyxis)
    [ -n "${GPTOSS_IMAGE:-}" ] || die "GPTOSS_CONTAINER = $GPTOSS_CONTAINER ($site), and GPTOSS_IMAGE says no image."
    # GPTOSS_LOCAL_TMP too: each step has a container of its own, Enroot gives each of them a /tmp of its own, and the driver reaches its
    # node's Ray through a socket there.
    # shellcheck disable=SC2086  # blanks stand between the folders of GPTOSS_MOUNTS
    mapfile -t mounts < <(printf '%s\n' ${GPTOSS_MOUNTS:-} "$GPTOSS_HOME" "$PWD" "$(readlink -m "$GPTOSS_RUNS")" "$GPTOSS_LOCAL_TMP" | sort -u)
    if [ "$GPTOSS_CONTAINER" = apptainer ]; then
      inside=(apptainer exec --nv --pwd "$PWD")
      for mount in "${mounts[@]}"; do inside+=(--bind "$mount"); done
      inside+=("$GPTOSS_IMAGE")
    else
      for mount in "${mounts[@]}"; do list+=",$mount:$mount"; done
      container=(--container-image="$GPTOSS_IMAGE" --container-mounts="${list#,}" --container-workdir="$PWD")
    fi ;;
  *) die "GPTOSS_CONTAINER = $GPTOSS_CONTAINER ($site) is none of none, apptainer, pyxis." ;;
esac
gpus=(); [ -z "${SLURM_GPUS_PER_NODE:-}" ] || gpus=(--gpus-per-node="$SLURM_GPUS_PER_NODE")

# A step on one node: all of the node, beside other steps. Only ever called with &: exec makes $! the srun itself; a subshell around it
# would die of the USR1 that is meant for srun's tasks. `limit`: more arguments of srun.
limit=()
on_node() {  # node, name of the step, arguments of node.sh
  local node=$1 name=$2; shift 2
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --job-name="$name" --cpus-per-task="$SLURM_CPUS_ON_NODE" \
    --mem=0 "${gpus[@]}" --kill-on-bad-exit=1 "${limit[@]}" "${container[@]}" "${inside[@]}" bash "$GPTOSS_HOME/launch/node.sh" "$@"
}

# Each node says what it lacks, before anything starts. A check that cannot even run is a node's failure, not a mistake in the settings.
check_nodes() {
  local node rc worst=0 unchecked=
  local -A on=()
  limit=(--time=3)   # minutes: a file system that does not answer must not hold the job. An image may have to be fetched first
  [ "${GPTOSS_CONTAINER:-none}" = none ] || limit=(--time=30)
  for node in "${nodes[@]}"; do
    on_node "$node" check preflight "$([ "$node" = "$head" ] && echo "$port" || echo 0)" "$(date +%s)" & on[$node]=$!
  done
  limit=()
  for node in "${nodes[@]}"; do
    wait "${on[$node]}"; rc=$?
    while [ "$rc" -gt 128 ] && [ -z "$killed" ] && kill -0 "${on[$node]}" 2>/dev/null; do wait "${on[$node]}"; rc=$?; done   # a signal
    case $rc in 0) ;; 42) worst=42 ;; *) unchecked+=" $node (srun: $rc)"; [ "$worst" = 42 ] || worst=1 ;; esac
  done
  [ "$worst" != 42 ] || die "some nodes are not as $site says (FAIL lines above). Nothing was started."
  [ -z "$unchecked" ] || say "could not be checked:$unchecked"
  return "$worst"
}

newest_checkpoint() {  # of the run; "none" before the first
  local run runs=("$resumed") file found=none
  [ -n "$resumed" ] || runs=("$GPTOSS_RUNS"/*-"$run_id")
  for run in "${runs[@]}"; do
    for file in "$run"/checkpoints/step-*/COMPLETE; do [ ! -e "$file" ] || found=${file%/COMPLETE}; done
  done
  echo "$found"
}

# One line for each start: job and checkpoint it began from, or "moved" when it ended through no fault of the run.
starts_from() {  # how many starts of this job in a row began from the checkpoint $1, this one included
  tac "$logs/starts" | awk -v line="$SLURM_JOB_ID $1" '$0 != line {exit} {count++} END {print count + 0}'
}
give_up_if_stuck() {  # starts in a row that have saved nothing new
  [ "$1" -lt "${GPTOSS_MAX_CRASHES:-3}" ] && return
  say "$1 starts in a row have saved nothing new (newest checkpoint: $newest): given up. Their logs: $logs"
  exit 1
}

killed='' warned='' timer='' driver=''
on_usr1() {
  say "Slurm warns that the time is nearly up: the run saves after its step, and goes on in a new start"
  warned=1
  [ -z "$driver" ] || kill -USR1 "$driver"   # srun hands it to the driver
  sleep "${GPTOSS_SAVE_S:-480}" & timer=$!
}
on_term() { killed=1; say "killed from outside: cancelled, requeued, preempted, over its time, or a node is lost"; }
trap on_usr1 USR1
trap on_term TERM

run_with_ray() {  # train|sft, then configuration files and flags
  local verb=$1 rc arg i; shift
  resumed=
  for ((i = 1; i <= $#; i++)); do
    arg=${!i}
    case $arg in --resume=*) resumed=${arg#*=} ;; --resume) i=$((i + 1)); resumed=${!i:-} ;; esac
  done
  newest=$(newest_checkpoint)
  echo "$SLURM_JOB_ID $newest" >>"$logs/starts"
  give_up_if_stuck $(($(starts_from "$newest") - 1))   # when the one before ended with its node, and Slurm started this one

  # Another port after each restart: what an earlier start left behind on a node that was cut off may still hold the old one.
  port=${GPTOSS_PORT:-0}
  [ "$port" != 0 ] || port=$((20000 + (SLURM_JOB_ID * 7 + restart) % 10000))
  say "job $SLURM_JOB_ID, start $((restart + 1)), on ${nodes[*]}; newest checkpoint: $newest; logs: $logs"
  check_nodes; rc=$?
  [ "$rc" = 0 ] || finish "$rc"
  [ -z "$warned" ] || finish 75
  start_all "$verb" "$@"
}

start_all() {
  local verb=$1 node rc who; shift
  # Ray turns its password on by itself where a file lies in somebody's home, and then only on the head. So: always, one a job.
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
  export RAY_NUM_REDIS_GET_RETRIES=100   # x 2 s: a worker waits so long for a head that a slow file system holds up
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  declare -gA name=()
  for node in "${nodes[@]}"; do
    on_node "$node" "ray-$node" ray "$([ "$node" = "$head" ] && echo head || echo worker)" "$port" "$run_id" >>"$logs/ray-$node.log" 2>&1 & name[$!]="Ray on $node"
  done
  on_node "$head" driver driver "$port" "$verb" "$@" --continue --run.dir="$GPTOSS_RUNS" --run.id="$run_id" --cluster.address=auto \
    --cluster.nodes="${#nodes[@]}" & driver=$!
  name[$driver]=driver
  # Whatever ends first decides. A signal ends the wait too: then nobody has ended, and `who` is unset.
  while :; do
    wait -n -p who "${!name[@]}" ${timer:+"$timer"}; rc=$?
    [ -z "${who:-}" ] || break
    [ -z "$killed" ] || break
  done
  if [ -n "$killed" ]; then rc=143
  elif [ "$who" = "$timer" ]; then say "no new checkpoint within $GPTOSS_SAVE_S s; the last one must do"; rc=75
  elif [ "$who" = "$driver" ] && [ -n "$warned" ] && [ "$rc" = 138 ]; then rc=75   # the warning came before the driver could hear it
  elif [ "$who" = "$driver" ]; then say "the driver ended with $rc"
  else
    say "${name[$who]} ended ($rc), which takes the run with it; its log: $logs/ray-${name[$who]#Ray on }.log"; rc=1
    driver_last_words
  fi
  stop_steps
  finish "$rc"
}

# When a node is lost the driver knows more: give it a moment to say so and to end by itself.
driver_last_words() {
  local i
  for ((i = 0; i < 200; i++)); do kill -0 "$driver" 2>/dev/null || return 0; sleep 0.1; done
}

# TERM to an srun has its step killed with KILL moments later; TERM that scancel sends to the step is an ordinary one, on which Ray cleans up.
stop_steps() {
  local step pid i left=()
  for step in $(squeue -h -s -j "$SLURM_JOB_ID" -o %i | grep -E '\.[0-9]+$'); do scancel --signal=TERM "$step" 2>/dev/null; done
  for ((i = 0; i < 150; i++)); do
    left=()
    for pid in "${!name[@]}"; do kill -0 "$pid" 2>/dev/null && left+=("$pid"); done
    [ ${#left[@]} != 0 ] || return 0
    sleep 0.1
  done
  say "some steps did not end by themselves and are killed"
  kill -TERM "${left[@]}" 2>/dev/null
}

finish() {  # the exit code; perhaps another start
  local rc=$1
  [ -z "$timer" ] || kill "$timer" 2>/dev/null
  [ -z "$killed" ] || [ "$rc" = 0 ] || rc=143
  case $rc in
    0) exit 0 ;;
    2 | 130) say "a restart would not mend this"; exit "$rc" ;;
    143) echo moved >>"$logs/starts"; exit 143 ;;   # whoever killed it decides whether it starts again
  esac
  [ "$(newest_checkpoint)" != "$newest" ] || give_up_if_stuck "$(starts_from "$newest")"
  if scontrol requeue "$SLURM_JOB_ID" || [ -n "$killed" ]; then   # Slurm's answer may be TERM to scontrol too
    say "to be started again"
    sleep 120 & wait $!   # Slurm ends this script meanwhile
    [ -z "$killed" ] || exit "$rc"
  fi
  say "Slurm does not start it again (was it submitted with --no-requeue?)"
  exit "$rc"
}

run_alone() {  # a verb on the first node, without Ray
  port=0
  check_nodes || exit 1
  on_node "$head" "$1" alone "$@" & driver=$!
  wait "$driver"; rc=$?
  exit "$rc"
}

# gptoss check on every node side by side, and of the links between them; then one summary. Each node's own words stay in $logs.
check_fitness() {
  local node word pid all links=() json=() files=() pids=()
  for word in "$@"; do [ "$word" != --json ] || json=(--json); done
  printf -v all ",%s" "${nodes[@]}"
  links=(--links="${all#,}" --meet="$GPTOSS_HEAD:$((20000 + SLURM_JOB_ID * 7 % 10000))")
  [ ${#nodes[@]} != 1 ] || links=()
  limit=(--time=6)   # minutes; it takes two
  for node in "${nodes[@]}"; do
    files+=("$logs/$node.json")
    on_node "$node" check alone check "$@" --json "${links[@]}" ${links:+--as="$node"} >"$logs/$node.json" 2>&1 & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  on_node "$head" check alone check "${json[@]}" "${files[@]/#/--read=}" & driver=$!
  wait "$driver"; exit $?
}
