"""Flags of Megatron-LM that this trainer does not take, or takes without effect, with reasons.

A flag that is refused by name is answered with the reason at once; an unknown one only meets its
nearest match. Refused is what contradicts the engine or would change a run that goes on without
it; the rest of such a feature's flags, and those that pre-training a GPT never reads, are idle.
Prefixes cover families that grow from version to version; a refused name wins over them. A flag
that the trainer takes must not appear here (a test holds this).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

# Below each reason its flags, without leading dashes; a prefix ends in a star.
_TABLE = """\
weight gradients and activations are the engine's to put off; use --split-backward
    delay-wgrad-compute ep-overlap-early-attn-memory-release
a dense checkpoint becomes experts in Megatron-LM's own converter alone; drop the flag
    moe-use-upcycling moe-upcycling-granularity
experts' tokens follow the router of this run, not one that was recorded; drop the flag
    moe-enable-routing-replay
it was renamed long ago; use --expert-tensor-parallel-size
    moe-extended-tp
it turns on parts of megatron-core that change from version to version; drop the flag
    enable-experimental
latent attention, with --multi-latent-attention, is the only variant that is built; use it
    experimental-attention-variant linear-attention-type experimental-attention-*
it needs a hook after the optimizer's step and kernels that report scores; use --qk-layernorm
    qk-clip log-max-attention-logit
state space and hybrid models are not built; drop the flag
    hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern
    is-hybrid-model
the embedding stands alone where the first stage has no layers; use --partition 0-...
    standalone-embedding-stage
there is one model with one number of stages; use --pipeline-model-parallel-size
    encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
    pipeline-model-parallel-split-rank
the pipeline moves its messages itself; choose the order with --pipeline-schedule
    use-ring-exchange-p2p pipeline-model-parallel-comm-backend defer-embedding-wgrad-compute
training is in float32, --fp16 or --bf16; use one of these
    fp8-format fp8-param-gather fp4-format fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag
    kitchen-config-file kitchen-recipe-number te-precision-config-file
optimizer state is kept in float32 on the device; split it with --use-distributed-optimizer
    use-precision-aware-optimizer optimizer-cpu-offload dump-param-to-param-group-map
    num-distributed-optimizer-instances overlap-param-gather-with-optimizer-step
activations stay on the device; lower them with --recompute-granularity
    cpu-offloading-num-layers fine-grained-activation-offloading
fully sharded data parallelism replaces the pipeline; use --use-distributed-optimizer
    use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 init-model-with-meta-device
a captured CUDA graph fixes the order of work, which the pipeline chooses at run time; drop the flag
    enable-cuda-graph external-cuda-graph cuda-graph-impl te-rng-tracker cuda-graph-modules
overlap inside tensor parallel layers needs user buffers of Transformer Engine that this trainer
does not set up; drop the flag
    tp-comm-overlap
communicators are set up by this trainer alone; drop the flag
    nccl-communicator-config-path use-nccl-ub use-sharp high-priority-stream-groups
    use-tp-pp-dp-mapping hierarchical-context-parallel-sizes hybrid-context-parallel
    disable-gloo-process-groups distributed-timeout-seconds-after-init lazy-mpu-init
    ddp-num-buckets nccl-*
torchrun gives the rank through the environment; start the program with torchrun
    local-rank local_rank
this program pre-trains only, without reinforcement learning or instruction tuning; drop the flag
    perform-rl-step
metrics go to the log and to loggers; use --tensorboard-dir, --wandb-project or --mlflow-experiment
    log-energy log-progress
slow ranks show in this trainer's own traces; use --trace-dir
    log-straggler run-workload-inspector-server
fault tolerance is torchrun's restarts and checkpoints; use --save and --load
    enable-ft-package inprocess-restart adlr-autoresume error-injection-rate rerun-mode
    iterations-to-skip replication check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval
checkpoints are written into --save as torch_dist by the ranks themselves; use --keep-checkpoints
    save-retain-interval dist-ckpt-save-pre-mcore-014
checkpoints on the nodes' own disks are on their way to --save; use --save-local
    non-persistent-save-interval non-persistent-ckpt-type
a checkpoint is loaded as torch_dist and must fit the flags; use --load
    dist-ckpt-format dist-ckpt-strictness ckpt-convert-format ckpt-convert-save
    pretrained-checkpoint load-main-params-from-ckpt use-checkpoint-args
    use-mp-args-from-checkpoint-args
a tokenizer is described by its own files, and rows follow from it; see --tokenizer-model
    tokenizer-metadata padded-vocab-size
data is read from local files; copy it and use --data-path
    enable-msc object-storage-cache-path
each split has a flag of its own; use --train-data-path, --valid-data-path and --test-data-path
    per-split-data-args-path per-dataset-sequences-path
validation uses --eval-iters batches of one mixed dataset; drop the flag
    full-validation multiple-validation-sets
samples are packed whole from the documents; drop the flag
    allow-ambiguous-pad-tokens fim-data
the batch size stays as given; choose --global-batch-size to fit the world size
    decrease-batch-size-if-needed
weights are drawn from one normal distribution, equal on all copies; use --init-method-std
    data-parallel-random-init init-method-xavier-uniform
layers come from --transformer-impl local or transformer_engine; use it
    spec use-legacy-models
results repeat with the same --seed on the same machine; drop the flag
    deterministic-mode batch-invariant-mode
device memory is left to PyTorch; see --log-memory-to-tensorboard
    record-memory-history empty-unused-memory-level train-sync-interval
settings are given as flags only; write them out
    yaml-cfg
it was renamed long ago; use --micro-batch-size
    batch-size
it was renamed long ago; use --lr-warmup-fraction
    warmup
it was renamed long ago; use --tensor-model-parallel-size
    model-parallel-size
it was renamed long ago; use --recompute-method and --recompute-num-layers
    activations-checkpoint-method activations-checkpoint-num-layers
it was renamed long ago; use --distributed-backend
    DDP-impl
"""

# Flags that are taken with whatever follows them, and change nothing.
_IDLE_TABLE = """\
it belongs to programs other than pre-training a GPT: vision, BERT, T5, retrieval, Mamba
    num-classes num-channels patch-dim classes-fraction data-per-class-fraction no-data-sharding
    head-lr-mult mask-type mask-factor iter-per-epoch mrope-section relative-attention-num-buckets
    relative-attention-max-distance output-bert-embeddings mask-prob short-seq-prob sample-rate
    vocab-extra-ids decoder-seq-length decoder-num-layers titles-data-path query-in-block-prob
    use-one-sent-docs evidence-data-path block-data-path embedding-path disable-mamba-mem-eff-path
    vision-* swin-* dino-* image-* img-* multimodal-* bert-* t5-* ict-* biencoder-* retriever-*
    indexer-* retro-* mamba-* dsa-* linear-* use-mamba-* no-use-mamba-*
it belongs to inference, reinforcement learning or instruction tuning
    max-tokens-to-oom flash-decode symmetric-ar-type nccl-all-reduce-for-prefill
    disable-chunked-prefill decode-only-cuda-graphs use-legacy-static-engine inference-*
    mlp-chunks-* rl-* grpo-* langrl-* sft-*
it is part of a feature whose own flag is refused
    fp8-* no-fp8-* fp4-* kitchen-* tp-only-amax-red first-last-layers-bf16
    num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 keep-fp8-transpose-cache
    optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d
    no-pin-cpu-* muon-* cpu-offloading-* no-cpu-offloading-* offload-modules
    min-offloaded-tensor-size data-parallel-sharding-strategy enable-full-sharding-in-hsdp
    suggested-communication-unit-size no-strict-fsdp-dtensor-load no-gradient-reduce-div-fusion
    outer-dp-sharding-strategy fsdp-* torch-fsdp2-* megatron-fsdp-* cuda-graph-* tp-comm-*
    no-tp-comm-* disable-tp-comm-* sharp-* disable-symmetric-registration straggler-*
    disable-straggler-on-startup calc-ft-timeouts inprocess-* ft-* adlr-* error-injection-*
    result-rejected-tracker-filename replication-* non-persistent-* ckpt-convert-* fim-*
    no-use-tokenizer-model-from-checkpoint-args memory-snapshot-path wgrad-deferral-limit qk-clip-*
    object-storage-* msc-*
it belongs to tokenizers that are not built
    tiktoken-special-tokens special-tokens legacy-tokenizer trust-remote-code null-tokenizer-*
    sentencepiece-*
what it turns on or off is always so here
    data-impl use-mcore-models no-async-tensor-model-parallel-allreduce exit-signal-handler
    no-manual-gc-eval ckpt-fully-parallel-save use-dist-ckpt
    disable-msc use-persistent-ckpt-worker ckpt-assume-constant-structure auto-detect-ckpt-format
    dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient async-ckpt-*
    mid-level-dataset-surplus no-scatter-gather-tensors-in-pipeline onnx-safe cache-mla-latents
    no-one-logger one-logger-* enable-one-logger app-tag-*
"""


def _reasons(table: str) -> dict[str, str]:
    """Returns the reason for each flag and each prefix of a table."""
    found: dict[str, str] = {}
    reason = ""
    for is_flags, lines in groupby(table.splitlines(), key=lambda line: line.startswith(" ")):
        text = " ".join(line.strip() for line in lines)
        if is_flags:
            found |= dict.fromkeys(text.split(), reason)
        reason = text
    return found


REFUSED, IDLE = _reasons(_TABLE), _reasons(_IDLE_TABLE)
"""Reasons by flags without leading dashes; a prefix ends in a star."""


def reason_for(name: str) -> str | None:
    """Returns why a flag of Megatron-LM is refused, ``None`` if it is not known to be one.

    Args:
        name: the flag with its dashes.
    """
    bare = name.removeprefix("--")
    known = bare in REFUSED or is_idle(name)
    return REFUSED.get(bare) if known else _by_prefix(bare, REFUSED)


def is_idle(name: str) -> bool:
    """Returns whether a flag of Megatron-LM is taken without any effect.

    Args:
        name: the flag with its dashes.
    """
    bare = name.removeprefix("--")
    return bare not in REFUSED and (bare in IDLE or _by_prefix(bare, IDLE) is not None)


def _by_prefix(bare: str, reasons: Mapping[str, str]) -> str | None:
    begun = (name for name in reasons if name.endswith("*") and bare.startswith(name[:-1]))
    return reasons.get(next(begun, ""))


def refused_flags() -> tuple[str, ...]:
    """Every flag that is refused by its full name, with dashes."""
    return tuple(f"--{name}" for name in REFUSED if not name.endswith("*"))
