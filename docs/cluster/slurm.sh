#!/bin/bash
# A run on two nodes of eight GPUs each: sbatch docs/cluster/slurm.sh. See slurm.md.
#SBATCH --job-name=lightning
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
set -euo pipefail

run=${RUN:-/shared/run.toml}     # has nodes = 2, gpus = 8, out on storage that all nodes share
environment=${VENV:-/shared/venv} # has lightning-trainer[verl] and the program
source "$environment/bin/activate"

port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 -w "$head" \
  ray start --head --node-ip-address="$address" --port=$port \
  --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_PER_NODE" --block &

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  sleep 15 # the head must listen before the others ask for it
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    ray start --address="$address:$port" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_PER_NODE" --block &
fi

# Wait until every node has joined, at most five minutes.
for _ in $(seq 60); do
  joined=$(RAY_ADDRESS="$address:$port" python -c 'import ray; ray.init(logging_level="error"); print(sum(n["Alive"] for n in ray.nodes()))' || echo 0)
  [ "$joined" -eq "$SLURM_JOB_NUM_NODES" ] && break
  sleep 5
done
[ "$joined" -eq "$SLURM_JOB_NUM_NODES" ] || { echo "only $joined of $SLURM_JOB_NUM_NODES nodes joined" >&2; exit 1; }

export RAY_ADDRESS="$address:$port"
srun --overlap --nodes=1 --ntasks=1 -w "$head" lightning-rl train --config "$run"
