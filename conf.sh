# shellcheck shell=bash disable=SC2034
# One file for a run on pods (run_master.sh, run_worker.sh) or on Slurm (python -m megatron.adaptive
# job submit conf.sh). Copy it, change it; what is commented out shows the default. bash reads it, so
# values may be computed; helpers of your own are written in small letters. Relative paths start
# from this file's folder. Variables of other programs (NCCL_DEBUG, GLOO_..., OMP_NUM_THREADS) are
# given to every process.

# ---- what is trained
JOB_NAME=gpt
MODEL=small                # tiny small gpt-125m ... gpt-13b llama-7b llama-13b, or a file of flags
TRAIN_ITERS=100
# LR=1e-4
GLOBAL_BATCH_SIZE=16
MICRO_BATCH_SIZE=1
DATA=mock                  # or the prefix of .bin and .idx: data/stdlib/corpus_text_document
# VOCAB_FILE=              # vocab.json beside DATA
# MERGE_FILE=              # merges.txt beside DATA
# TRAINER_FLAGS='--bf16'   # further flags of pretrain_gpt.py; see docs/flags.md

# ---- how it is spread
# PLAN=plan.json           # stands in for degrees, partition, schedule and nodes; see docs/plan.md
TENSOR_MP_SIZE=1
PIPELINE_MP_SIZE=2
# DP_SIZE=                 # WORLD_SIZE / (tensor x pipeline x context sizes)
# STAGE_DP_SIZES=2-1       # ranks of each stage where they differ, instead of DP_SIZE
# MODEL_CHUNKS=1
# EXPERT_MP_SIZE=1         # copies that the experts of a layer are spread over
# CONTEXT_MP_SIZE=1        # ranks that share each sequence
# PARTITION=4-4            # layers of each stage; the same number for each without it
# SCHEDULE=adaptive
# RECOMPUTE=none           # or selective, full
# DISTRIBUTED_OPTIMIZER=false
# OVERLAP_GRAD_REDUCE=false
# SEQUENCE_PARALLEL=false
# SEQUENCE_SLICES=8        # slices into which each sequence is cut, or auto
# SLICE_TOKENS=2048        # tokens of each slice of packed documents, or auto
# ACTIVATION_CAP=4         # most microbatches whose activations a rank keeps
# PRECISION=               # fp32, fp16 or bf16; as TRAINER_FLAGS say without it

# ---- where it runs
HOMOGENEOUS_CLUSTER=true
NNODES=2
# NPROC_PER_NODE=1         # on pods every node counts its GPUs without it
# WORLD_SIZE=2             # checked if given
# Mixed nodes instead: types in the order of the ranks, TYPE:NODESxGPUS
# HOMOGENEOUS_CLUSTER=false
# NODES='a10:2x4 v100:1x2'
DEVICE=gpu                 # or cpu
# PYTHON=                  # Python of the nodes; by default the one that starts the job

# ---- pods: all of it is found if not given
# MASTER_ADDR=10.0.0.1     # of the first node
# MASTER_PORT=29500        # on Slurm by default a port of the job's own
# IFNAME=eth0
# MEETING_TIMEOUT_S=600

# ---- Slurm; with mixed nodes one value for all types or TYPE=VALUE for each
# SLURM_PARTITION=a10      # or 'a10=fast v100=old'
# SLURM_GRES=gpu           # or gpu:a10, or 'a10=gpu:a10 v100=gpu:v100'; none asks for no GPU
# SLURM_TIME=2:00:00
# SLURM_ACCOUNT=
# SLURM_FLAGS='--exclusive'
# CPUS_PER_TASK=8
# REQUEUE=true             # a job that is preempted, runs out of time or loses a node goes on by
                           # itself from its last checkpoint; with false it ends

# ---- container
# CONTAINER=none           # pyxis, enroot or apptainer
# IMAGE=
# CONTAINER_MOUNTS=/data:/data
# RELOAD_CONTAINER=false

# ---- what it leaves
LOG_DIR=logs               # a folder for each job
# CHECKPOINT_DIR=checkpoints
# LOCAL_CHECKPOINT_DIR=/scratch/run   # on each node's own disk: written there first, then copied
# SAVE_INTERVAL=100
# TRACE=false              # traces of the pipeline for python -m megatron.adaptive trace
# PROFILE=false            # PyTorch profiler
# NSYS=false               # Nsight Systems
# NCU=false                # Nsight Compute
