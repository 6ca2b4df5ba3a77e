# shellcheck shell=bash disable=SC2034
# This file configures a run on pods (run_master.sh, run_worker.sh) or on Slurm (python -m
# megatron.adaptive job submit conf.sh). Copy the file and change it; commented-out lines show
# defaults. bash executes the file, so values may be computed; name your own helper variables in
# lowercase. Relative paths are relative to this file's folder. Variables of other programs
# (NCCL_DEBUG, GLOO_..., OMP_NUM_THREADS) are passed to every process.

# ---- training
JOB_NAME=gpt
MODEL=small                # tiny small gpt-125m ... gpt-13b llama-7b llama-13b, or a file of flags
TRAIN_ITERS=100
# LR=1e-4
GLOBAL_BATCH_SIZE=16
MICRO_BATCH_SIZE=1
DATA=mock                  # or the prefix of .bin and .idx: data/stdlib/corpus_text_document
# VOCAB_FILE=              # vocab.json beside DATA
# MERGE_FILE=              # merges.txt beside DATA
# TRAINER_FLAGS='--bf16'   # additional flags of pretrain_gpt.py; see docs/flags.md

# ---- parallelism
# PLAN=plan.json           # replaces sizes, partition, schedule and nodes; see docs/plan.md
TENSOR_MP_SIZE=1
PIPELINE_MP_SIZE=2
# DP_SIZE=                 # WORLD_SIZE / (tensor x pipeline x context sizes)
# STAGE_DP_SIZES=2-1       # replicas of each stage if they differ, instead of DP_SIZE
# MODEL_CHUNKS=1
# EXPERT_MP_SIZE=1         # replicas over which the experts of a layer are spread
# CONTEXT_MP_SIZE=1        # ranks that share each sequence
# PARTITION=4-4            # layers of each stage; by default the same number for each stage
# SCHEDULE=adaptive
# RECOMPUTE=none           # or selective, full
# DISTRIBUTED_OPTIMIZER=false
# OVERLAP_GRAD_REDUCE=false
# SEQUENCE_PARALLEL=false
# SEQUENCE_SLICES=8        # slices into which each sequence is cut, or auto
# SLICE_TOKENS=2048        # tokens of each slice of packed documents, or auto
# ACTIVATION_CAP=4         # most microbatches whose activations a rank keeps
# PRECISION=               # fp32, fp16 or bf16; if it is empty, TRAINER_FLAGS decide

# ---- nodes
HOMOGENEOUS_CLUSTER=true
NNODES=2
# NPROC_PER_NODE=1         # on pods, by default the number of GPUs of each node
# WORLD_SIZE=2             # if set, must be the total number of processes
# For mixed nodes, list the types in the order of the ranks, as TYPE:NODESxGPUS:
# HOMOGENEOUS_CLUSTER=false
# NODES='a10:2x4 v100:1x2'
DEVICE=gpu                 # or cpu
# PYTHON=                  # Python on the nodes; by default the Python that starts the job

# ---- pods; all of these are detected by default
# MASTER_ADDR=10.0.0.1     # address of the first node
# MASTER_PORT=29500        # on Slurm, by default a separate port for each job
# IFNAME=eth0
# MEETING_TIMEOUT_S=600

# ---- Slurm; for mixed nodes, a value for all types, or TYPE=VALUE for each type
# SLURM_PARTITION=a10      # or 'a10=fast v100=old'
# SLURM_GRES=gpu           # or gpu:a10, or 'a10=gpu:a10 v100=gpu:v100'; none to request no GPUs
# SLURM_TIME=2:00:00
# SLURM_ACCOUNT=
# SLURM_FLAGS='--exclusive'
# CPUS_PER_TASK=8
# REQUEUE=true             # a job that is preempted, reaches its time limit or loses a node resumes
                           # from its last checkpoint; with false, it stops

# ---- container
# CONTAINER=none           # pyxis, enroot or apptainer
# IMAGE=
# CONTAINER_MOUNTS=/data:/data
# RELOAD_CONTAINER=false

# ---- output
LOG_DIR=logs               # contains a folder for each job
# CHECKPOINT_DIR=checkpoints
# LOCAL_CHECKPOINT_DIR=/scratch/run   # folder on each node's disk for fast writes, copied later
# SAVE_INTERVAL=100
# TRACE=false              # pipeline traces for python -m megatron.adaptive trace
# PROFILE=false            # PyTorch profiler
# NSYS=false               # Nsight Systems
# NCU=false                # Nsight Compute
