#!/bin/bash
# Start a Slurm of eight made-up nodes with 8 GPUs each on this host, as root, from Debian's package slurm-wlm. Two of
# them have a slurmd. Then `export SLURM_CONF=FOLDER/slurm.conf`, and `sbatch --test-only` checks what `launch` writes.
#
#     tests/cli/local_slurm.sh FOLDER
set -e
folder=$(realpath "$1")
mkdir -p "$folder"/state "$folder"/spool.n{1,2} /run/munge
chown munge /run/munge
touch "$folder"/gpu{0..7}
cat > "$folder/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdLogFile=$folder/slurmd.%n.log
SlurmctldPort=26817
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-8] NodeAddr=127.0.0.1 Port=[27001-27008] CPUs=16 RealMemory=1000 Gres=gpu:8
PartitionName=main Nodes=n[1-8] Default=YES
CONF
echo "NodeName=n[1-8] Name=gpu File=$folder/gpu[0-7]" > "$folder/gres.conf"
pgrep -x munged > /dev/null || su -s /bin/sh munge -c munged
slurmctld -f "$folder/slurm.conf"
for node in n1 n2; do slurmd -N $node -f "$folder/slurm.conf"; done
