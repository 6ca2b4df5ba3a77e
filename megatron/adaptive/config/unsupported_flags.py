"""Lists flags of Megatron-LM that this trainer rejects or ignores, with the reasons.

A flag is rejected if it contradicts the pipeline engine, or if ignoring it would result in a
different training run. The error message contains the reason. The message for an unknown flag only
suggests the most similar flag. If the main flag of a feature is rejected, the other flags of this
feature are accepted and ignored. Flags that are never used in GPT pre-training are also ignored. A
prefix stands for a group of flags, because such groups grow with each version of Megatron-LM.
Prefixes do not apply to flags listed by their full names. A test checks that no flag of this
trainer is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

# Each reason is followed by the flags to which it applies, without leading dashes. A prefix ends
# with a star.
_TABLE = """\
the engine itself delays weight gradients and frees activations; use --split-backward
    delay-wgrad-compute ep-overlap-early-attn-memory-release
only Megatron-LM's own converter can create experts from a dense checkpoint; drop the flag
    moe-use-upcycling moe-upcycling-granularity
this trainer cannot replay a recorded routing of tokens to experts; drop the flag
    moe-enable-routing-replay moe-n-hash-layers
it was renamed long ago; use --expert-tensor-parallel-size
    moe-extended-tp
it turns on parts of megatron-core that change from version to version; drop the flag
    enable-experimental
latent attention is the only variant that is supported; use --multi-latent-attention
    experimental-attention-variant linear-attention-type experimental-attention-* o-groups
it requires a hook after the optimizer's step and kernels that report attention scores, which this
trainer does not have; use --qk-layernorm
    qk-clip log-max-attention-logit
state space and hybrid models are not supported; drop the flag
    hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern
    is-hybrid-model
torch computes the matrix multiplications of muon; drop the flag
    muon-use-syrk
a first stage without layers contains only the embedding; use --partition 0-...
    standalone-embedding-stage
the model has no separate encoder with its own stages; use --pipeline-model-parallel-size
    encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
    pipeline-model-parallel-split-rank
the pipeline sends its messages itself; choose the order with --pipeline-schedule
    use-ring-exchange-p2p pipeline-model-parallel-comm-backend defer-embedding-wgrad-compute
other data types are not supported; use --fp16, --bf16 or, without a flag, float32
    fp8-format fp8-param-gather fp4-format fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag
    kitchen-config-file kitchen-recipe-number te-precision-config-file
optimizer state is kept in float32 on the device; split it with --use-distributed-optimizer
    use-precision-aware-optimizer optimizer-cpu-offload dump-param-to-param-group-map
    num-distributed-optimizer-instances overlap-param-gather-with-optimizer-step
    use-layer-wise-distributed-optimizer chunked-optimizer-state-offload offload-optimizer-states
activations stay on the device; save memory with --recompute-granularity
    cpu-offloading-num-layers fine-grained-activation-offloading
the engine frees activations in the order that it chooses at run time; drop the flag
    moe-paged-stash
weights cannot be sharded further; use --use-distributed-optimizer
    tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
megatron-core's layers always add their input to their output; drop the flag
    apply-residual-connection-post-layernorm
megatron-core does not implement it; limit the tokens of experts with --moe-expert-capacity-factor
    moe-token-dropping
layers with several residual streams are not supported; drop the flag
    enable-mhc-connections enable-hyper-connections
scaling by the width of the model (muP) is not supported; set --lr and --init-method-std
    use-mup
fully sharded data parallelism replaces the pipeline; use --use-distributed-optimizer
    use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 init-model-with-meta-device
a captured CUDA graph fixes the order of work, which the pipeline chooses at run time; drop the
flag
    enable-cuda-graph external-cuda-graph cuda-graph-impl te-rng-tracker cuda-graph-modules
    optimizer-cuda-graph
overlap inside tensor parallel layers needs user buffers of Transformer Engine that this trainer
does not set up; drop the flag
    tp-comm-overlap
this trainer sets up its communicators itself; drop the flag
    nccl-communicator-config-path use-nccl-ub use-sharp high-priority-stream-groups
    use-tp-pp-dp-mapping hierarchical-context-parallel-sizes hybrid-context-parallel
    disable-gloo-process-groups distributed-timeout-seconds-after-init lazy-mpu-init ddp-num-buckets
    nccl-* create-all-gather-group dynamic-context-parallel
torch reads the settings of its flight recorder from the environment; set the variable
TORCH_FR_BUFFER_SIZE
    flight-recorder-dump-path
fake process groups are not supported; predict a step with python -m megatron.adaptive plan or
simulate
    fake-process-group
torchrun sets the rank in the environment; start the program with torchrun
    local-rank local_rank
reinforcement learning is not supported; drop the flag
    perform-rl-step
metrics go to the log and to loggers; use --tensorboard-dir, --wandb-project or --prometheus-address
    log-energy log-progress otel-enabled
only Megatron-LM's own trainer records this; drop the flag
    save-activations-interval save-wgrads-interval save-dgrads-interval save-params-interval
    save-tokens-per-expert-interval moe-routing-trace-path log-moe-overload-factor
distillation from saved logits is not supported; drop the flag
    logits-load-dir logits-save-dir
quantization and distillation with ModelOpt are not supported; drop the flag
    export-* modelopt-enabled enable-gpt-oss finetune-hf-dataset qad-train-target
all parameters of the model are trained; drop the flag, or train adapters with --lora-rank
    freeze-base-for-mtp
this trainer's traces show slow ranks; use --trace-dir
    log-straggler run-workload-inspector-server
GPUs are checked before a run, not during it; use python -m megatron.adaptive doctor
    gpu-sniff-test-interval
SIGTERM, SIGINT and SIGUSR1 always end the run and, with --save, save a checkpoint; drop the flag
    exit-signal
only Megatron-LM's own trainer injects faults; drop the flag
    fault-injector-*
torchrun restarts a run after a fault, from a checkpoint; use --save and --load
    enable-ft-package inprocess-restart adlr-autoresume error-injection-rate rerun-mode
    iterations-to-skip replication check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval
the ranks write checkpoints in the format torch_dist to --save; use --keep-checkpoints
    save-retain-interval dist-ckpt-save-pre-mcore-014
checkpoints on local disks are only temporary, until they are copied to --save; use --save-local
    non-persistent-save-interval non-persistent-ckpt-type
checkpoints have the format torch_dist and must fit the flags; use --load
    dist-ckpt-format dist-ckpt-strictness ckpt-convert-format ckpt-convert-save
    pretrained-checkpoint load-main-params-from-ckpt use-checkpoint-args
    use-mp-args-from-checkpoint-args
a checkpoint determines the iteration at which training continues; use --ckpt-step
    override-ckpt-iteration
the tokenizer's files determine its properties and the vocabulary's size; see --tokenizer-model
    tokenizer-metadata padded-vocab-size
the tokenizer's files hold all its tokens; add the tokens there
    vocab-extra-ids
--sft uses the template in the tokenizer's folder; put chat_template.jinja there
    sft-tokenizer-prompt-format chat-template
the vocabulary is padded for tensor parallelism; use --make-vocab-size-divisible-by
    no-pad-vocab-size
data is read from local files; copy it and use --data-path
    enable-msc object-storage-cache-path
each split has a separate flag; use --train-data-path, --valid-data-path and --test-data-path
    per-split-data-args-path per-dataset-sequences-path
validation uses --eval-iters batches of one mixed dataset; drop the flag
    full-validation multiple-validation-sets
validation uses the batch size of training and starts together with training; use --eval-interval
    eval-global-batch-size eval-micro-batch-size start-eval-at-iter
the mixture of datasets cannot change during a run; resume with another --data-path
    phase-transition-iterations
documents are joined, so that every sample is full; drop the flag
    allow-ambiguous-pad-tokens fim-data
this trainer packs documents itself; use --variable-seq-lengths
    use-varlen-dataset sequence-packing-scheduler
only layers with a window can have a separate rotary base; use --window-rotary-base
    rotary-base-per-layer
attention within documents has a separate flag; use --reset-attention-mask
    dataloader-inter-document-masking
the batch size does not change; choose --global-batch-size to fit the world size
    decrease-batch-size-if-needed
the batch size can grow only in equal steps; use --rampup-batch-size
    step-batch-size-schedule
if weights are frozen, only adapters can be trained; use --lora-rank
    freeze-all-layers
weights of normalization layers and biases have no weight decay; drop the flag
    no-weight-decay-cond-type
initial weights are normally distributed and the same on all replicas; use --init-method-std
    data-parallel-random-init init-method-xavier-uniform
--transformer-impl selects the layers; use local or transformer_engine
    spec use-legacy-models
the set of compiled functions cannot be changed; drop the flag
    disable-jit-fuser
a run with the same --seed on the same machine repeats its results; drop the flag
    deterministic-mode batch-invariant-mode
PyTorch manages device memory; see --log-memory-to-tensorboard
    record-memory-history empty-unused-memory-level train-sync-interval
    log-device-memory-used log-memory-interval
this trainer does not read settings from such a file; pass them as flags
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

# Flags accepted with any value, but ignored. The notation is the same as above.
_IDLE_TABLE = """\
it belongs to programs other than pre-training a GPT: vision, BERT, T5, retrieval, Mamba
    num-classes num-channels patch-dim classes-fraction data-per-class-fraction no-data-sharding
    head-lr-mult mask-type mask-factor iter-per-epoch mrope-section relative-attention-num-buckets
    relative-attention-max-distance output-bert-embeddings mask-prob short-seq-prob sample-rate
    decoder-seq-length decoder-num-layers titles-data-path query-in-block-prob
    use-one-sent-docs evidence-data-path block-data-path embedding-path disable-mamba-mem-eff-path
    vision-* swin-* dino-* image-* img-* multimodal-* bert-* t5-* ict-* biencoder-* retriever-*
    indexer-* retro-* mamba-* dsa-* linear-* use-mamba-* no-use-mamba-* mrope-interleaved
it belongs to inference, reinforcement learning or instruction tuning
    max-tokens-to-oom flash-decode symmetric-ar-type nccl-all-reduce-for-prefill
    disable-chunked-prefill decode-only-cuda-graphs use-legacy-static-engine inference-*
    mlp-chunks-* rl-* grpo-* langrl-* sft-* enable-chunked-prefill
    no-inference-* no-rl-* no-langrl-*
    num-speculative-tokens moe-pad-experts-for-cuda-graph-inference refit-method
    use-same-sampling-seed-across-dp-ranks disable-grad-buffers-cpu-backup
    disable-param-buffers-cpu-backup
it is part of a feature whose own flag is refused
    fp8-* no-fp8-* fp4-* kitchen-* tp-only-amax-red first-last-layers-bf16
    num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 keep-fp8-transpose-cache
    optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d
    no-pin-cpu-* adaptive-muon-* soap-* no-soap-* cpu-offloading-*
    no-cpu-offloading-* offload-modules min-offloaded-tensor-size data-parallel-sharding-strategy
    enable-full-sharding-in-hsdp suggested-communication-unit-size no-strict-fsdp-dtensor-load
    no-gradient-reduce-div-fusion outer-dp-sharding-strategy fsdp-* no-fsdp-* torch-fsdp2-*
    megatron-fsdp-* cuda-graph-* no-cuda-graph-* tp-comm-* no-tp-comm-* disable-tp-comm-* sharp-*
    disable-symmetric-registration straggler-* disable-straggler-on-startup calc-ft-timeouts
    inprocess-* ft-* adlr-* error-injection-* result-rejected-tracker-filename replication-*
    non-persistent-* ckpt-convert-* fim-* no-use-tokenizer-model-from-checkpoint-args
    memory-snapshot-path wgrad-deferral-limit qk-clip-* object-storage-* msc-*
    activation-offload-fraction fine-grained-offloading-* delay-offload-until-cuda-graph
    delta-offload-bytes-across-pp-ranks batch-invariant-backend gtp-* expert-gtp-* mhc-* mup-*
    lion-* gdp-* no-dsa-* mtp-hybrid-override-pattern mtp-standalone otel-* flight-recorder-*
    no-flight-recorder-* logits-* moe-paged-stash-* moe-routing-trace-* exit-signal-handler-for-*
    use-kitchen-attention max-seqlen-per-dp-cp-rank yarn-* no-yarn-* validation-set-names
    no-use-layer-wise-param-layout optimizer-state-offload-* csa-* gdn-* num-residual-streams
    use-fused-mhc o-lora-rank use-layer-wise-param-layout varlen-* thd-* pad-packed-seq-alignment
    min-dynamic-context-parallel-size cp-partition-mode finetune-data-*
it tunes how megatron-core reads or writes files, which this trainer does itself
    ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-*
    ckpt-fully-parallel-save-process-group ckpt-pg-* async-strategy dist-ckpt-workers
    no-ckpt-load-validate-sharding-integrity verify-integrity no-save-tokenizer-assets
    dataloader-defer-npy-index-mmap dataloader-fast-cache-load no-stream-ckpt-dequant
it adds detail to the profiles of Megatron-LM's own trainer
    nvtx-ranges record-shapes pytorch-profiler-collect-*
it belongs to other tokenizers, or tunes how Megatron-LM loads a tokenizer
    special-tokens legacy-tokenizer trust-remote-code null-tokenizer-*
    sentencepiece-* tokenizer-hf-* tokenizer-sentencepiece-* no-tokenizer-sentencepiece-*
    use-gigatoken
this trainer always behaves as with this flag
    data-impl use-mcore-models no-async-tensor-model-parallel-allreduce exit-signal-handler
    no-masked-softmax-fusion no-manual-gc-eval ckpt-fully-parallel-save use-dist-ckpt
    disable-msc use-persistent-ckpt-worker ckpt-assume-constant-structure auto-detect-ckpt-format
    dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient async-ckpt-*
    mid-level-dataset-surplus no-scatter-gather-tensors-in-pipeline onnx-safe cache-mla-latents
    no-one-logger one-logger-* enable-one-logger app-tag-*
"""

# Settings that later releases of megatron-core add to their configuration classes. If such a
# release is installed, the settings become flags of this trainer.
_NEWER = """
    ddp-param-name-patterns-for-fp32-local-accumulation dense-grouped-gemm fallback-to-eager-attn
    flash-attention-version fused-residual-rmsnorm grad-norm-skip-threshold head-wise-attn-gate
    high-priority-a2a-comm-stream mla-down-proj-fusion moe-combine-bwd-dtype moe-dispatch-fwd-dtype
    moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
    moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing
    moe-hybridep-pad-uneven-dispatch-inputs moe-hybridep-pad-variable-tokens
    moe-mlp-glu-interleave-size moe-ncclep-static-shape moe-ncclep-use-symm-mem moe-ncclep-zero-copy
    moe-permute-fusion-into-hybridep moe-router-force-biased moe-router-quantile-balancing-ema
    moe-shared-expert-glu-interleave-size moe-single-grouped-bias moe-single-grouped-weight
    moe-use-grouped-tensor mtp-detach-heads mtp-hsm mtp-use-repeated-layer output-logit-dtype
    overlap-dispatch-backward-with-experts-wgrad use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert use-transformer-engine-op-fuser
"""
NEWER = tuple(f"--{name}" for name in _NEWER.split())
"""Flags, with dashes, that this trainer supports only with a later release of megatron-core."""


def _reasons(table: str) -> dict[str, str]:
    """Parses ``table``, and returns the reason for each listed flag or prefix."""
    reasons: dict[str, str] = {}
    reason = ""
    for is_flags, lines in groupby(table.splitlines(), key=lambda line: line.startswith(" ")):
        text = " ".join(line.strip() for line in lines)
        if is_flags:
            reasons |= dict.fromkeys(text.split(), reason)
        reason = text
    return reasons


REFUSED = _reasons(_TABLE)
"""Reason for each rejected flag, keyed by name without leading dashes. A prefix ends with a star.
"""
IDLE = _reasons(_IDLE_TABLE)
"""Reason for each ignored flag, keyed by name without leading dashes. A prefix ends with a star."""


def reason_for(name: str) -> str | None:
    """Returns why the trainer rejects a flag of Megatron-LM, or ``None`` for all other flags.

    Args:
        name: Name of the flag, with leading dashes.
    """
    bare = _listed_name(name)
    is_listed = bare in REFUSED or is_idle(name)
    return REFUSED.get(bare) if is_listed else _by_prefix(bare, REFUSED)


def is_idle(name: str) -> bool:
    """Returns whether the flag ``name`` of Megatron-LM is accepted but ignored.

    Args:
        name: Name of the flag, with leading dashes.
    """
    bare = _listed_name(name)
    return bare not in REFUSED and (bare in IDLE or _by_prefix(bare, IDLE) is not None)


def with_no(name: str) -> str:
    """Returns ``--no-X`` if ``name`` is ``--disable-X``, otherwise ``name`` itself.

    Megatron-LM accepts both spellings of a flag for a setting that is on by default.
    """
    disabled = "--disable-"
    return f"--no-{name.removeprefix(disabled)}" if name.startswith(disabled) else name


def _listed_name(name: str) -> str:
    """Returns the name of the flag ``name`` in this module's tables, without leading dashes."""
    bare = name.removeprefix("--")
    if bare in REFUSED or bare in IDLE or _by_prefix(bare, REFUSED) or _by_prefix(bare, IDLE):
        return bare
    return with_no(name).removeprefix("--")


def _by_prefix(bare: str, reasons: Mapping[str, str]) -> str | None:
    prefixes = (name for name in reasons if name.endswith("*") and bare.startswith(name[:-1]))
    return reasons.get(next(prefixes, ""))


def refused_flags() -> tuple[str, ...]:
    """Returns the rejected flags listed by their full names, with leading dashes."""
    return tuple(f"--{name}" for name in REFUSED if not name.endswith("*"))
