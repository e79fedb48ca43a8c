# SPDX-License-Identifier: Apache-2.0
# Sourced after hosts.sh: a real Slurm of Debian's packages, its controller on ctl (this namespace) and its nodes on hosts.
# Needs root: slurmd gives up the groups that root has.
#
#   start_slurm DIR NODE...   partition `low` (2 s of grace) is preempted by `high`: its jobs are requeued
#                             (its daemons end with the caller's namespace of processes)

start_slurm() {
  local dir=$1 node
  shift
  mkdir -p "$dir/state" "$dir/log"
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$dir/cgroup.conf"
  cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/ctl.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/log/ctl.log
SlurmdLogFile=$dir/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=3
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PartitionName=low Nodes=$(IFS=,; echo "$*") Default=YES PriorityTier=1 GraceTime=2
PartitionName=high Nodes=$(IFS=,; echo "$*") PriorityTier=10
CONF
  for node in "$@"; do
    mkdir -p "$dir/spool-$node"
    echo "NodeName=$node CPUs=2 State=UNKNOWN" >>"$dir/slurm.conf"
  done
  export SLURM_CONF="$dir/slurm.conf"
  slurmctld -f "$SLURM_CONF"
  for node in "$@"; do on_host "$node" slurmd -f "$SLURM_CONF" -N "$node"; done
  local give_up=$((SECONDS + 30))
  until [ "$(sinfo -h -N -p low -o %t 2>/dev/null | grep -c idle)" -eq $# ]; do
    [ $SECONDS -lt $give_up ] || { tail -n 20 "$dir"/log/*; echo "Slurm is not up after 30 s"; return 1; }
    sleep 0.1
  done
}
