"""Flags of Megatron-LM that this trainer does not take, each family with its reason.

A flag that is refused by name is answered with the reason at once; an unknown one only meets its
nearest match. Prefixes cover families that grow from version to version. A flag that the trainer
takes must not appear here (a test holds this).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

# Below each reason its flags, without leading dashes; a prefix ends in a star.
_TABLE = """\
the model is a dense GPT without experts; drop the flag
    num-experts expert-model-parallel-size expert-tensor-parallel-size
    overlap-moe-expert-parallel-comm delay-wgrad-compute use-fused-weighted-squared-relu
    enable-experimental ep-overlap-early-attn-memory-release moe-layer-freq moe-grouped-gemm
    moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-ffn-hidden-size
    moe-token-dispatcher-type moe-layer-recompute moe-use-upcycling moe-* expert-*
latent attention is not built; use --group-query-attention to shrink keys and values
    multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    rotary-scaling-factor mscale mscale-all-dim cache-mla-latents rope-type mla-* dsa-*
    experimental-attention-* linear-attention-* linear-key-* linear-value-* linear-num-*
    linear-conv-*
attention variants beyond full causal attention are not built; drop the flag
    softmax-type window-size window-attn-skip-freq no-rope-freq qk-l2-norm qk-clip
    attention-output-gate relative-attention-num-buckets relative-attention-max-distance
only GELU, --swiglu and --squared-relu are built; use one of these
    openai-gelu quick-geglu activation-func-clamp-value glu-linear-offset use-te-activation-func
    onnx-safe
multi-token prediction is not built; drop the flag
    mtp-num-layers mtp-loss-scaling-factor mtp-*
the model is text only; drop the flag
    mrope-section vision-pretraining vision-pretraining-type vision-backbone-type
    swin-backbone-type num-classes img-h img-w num-channels patch-dim classes-fraction
    data-per-class-fraction no-data-sharding head-lr-mult mask-type mask-factor iter-per-epoch
    vision-* swin-* dino-* image-* img-* multimodal-*
only GPT is trained, neither BERT nor T5 nor a retriever; drop the flag
    bert-no-binary-head bert-load bert-embedder-type output-bert-embeddings mask-prob
    short-seq-prob sample-rate vocab-extra-ids decoder-seq-length retriever-seq-length
    decoder-num-layers encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
    pipeline-model-parallel-split-rank ict-head-size ict-load biencoder-projection-dim
    biencoder-shared-query-context-model titles-data-path query-in-block-prob use-one-sent-docs
    evidence-data-path retriever-score-scaling retriever-report-topk-accuracies block-data-path
    embedding-path indexer-batch-size indexer-log-interval bert-* t5-* ict-* biencoder-*
    retriever-* indexer-*
it is another name for a GPT flag; use --num-layers
    encoder-num-layers
it is another name for a GPT flag; use --seq-length
    encoder-seq-length
Retro models are not built; drop the flag
    retro-project-dir retro-*
state space and hybrid models are not built; drop the flag
    hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern is-hybrid-model
    mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads disable-mamba-mem-eff-path
    mamba-* hybrid-*
all layers are alike; uneven stages are given with --partition
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json heterogeneous-*
layers per stage are given with --partition, which covers every such case
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    pipeline-model-parallel-layout account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split standalone-embedding-stage
the pipeline moves its messages itself; choose the order with --pipeline-schedule
    overlap-p2p-communication-warmup-flush use-ring-exchange-p2p
    no-scatter-gather-tensors-in-pipeline pipeline-model-parallel-comm-backend
    defer-embedding-wgrad-compute wgrad-deferral-limit
training is in float32, --fp16 or --bf16; use one of these
    fp8-format fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo
    fp8-param-gather fp8-quantizer-factory no-fp8-wgrad fp4-format fp4-recipe fp4-param-gather
    fp4-quantizer-factory first-last-layers-bf16 num-layers-at-start-in-bf16
    num-layers-at-end-in-bf16 keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag
    kitchen-config-file kitchen-recipe-number disable-bf16-reduced-precision-matmul fp8-* fp4-*
    kitchen-*
optimizer state is kept in float32 on the device; split it with --use-distributed-optimizer
    use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
    exp-avg-sq-dtype optimizer-cpu-offload optimizer-offload-fraction
    use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads
    no-pin-cpu-params dump-param-to-param-group-map num-distributed-optimizer-instances
    overlap-param-gather-with-optimizer-step
only the optimizers adam and sgd are built; use --optimizer adam
    muon-momentum muon-no-split-qkv muon-use-nesterov muon-scale-mode muon-*
activations stay on the device; lower them with --recompute-granularity
    cpu-offloading-num-layers fine-grained-activation-offloading offload-modules
    min-offloaded-tensor-size cpu-offloading-*
fully sharded data parallelism replaces the pipeline; use --use-distributed-optimizer
    use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 data-parallel-sharding-strategy
    torch-fsdp2-no-reshard-after-forward fsdp-double-buffer enable-full-sharding-in-hsdp
    suggested-communication-unit-size no-strict-fsdp-dtensor-load init-model-with-meta-device
    no-gradient-reduce-div-fusion outer-dp-sharding-strategy fsdp-* torch-fsdp2-*
    megatron-fsdp-*
a captured CUDA graph fixes the order of work, which the pipeline chooses at run time; drop the flag
    enable-cuda-graph external-cuda-graph cuda-graph-impl cuda-graph-scope
    cuda-graph-warmup-steps te-rng-tracker cuda-graph-*
overlap inside tensor parallel layers needs user buffers of Transformer Engine that this trainer
does not set up; drop the flag
    tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad tp-comm-bootstrap-backend
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad
    disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-*
    disable-tp-comm-*
communicators are set up by this trainer alone; drop the flag
    nccl-communicator-config-path use-nccl-ub disable-symmetric-registration use-sharp
    sharp-enabled-group high-priority-stream-groups use-tp-pp-dp-mapping
    hierarchical-context-parallel-sizes hybrid-context-parallel disable-gloo-process-groups
    distributed-timeout-seconds-after-init lazy-mpu-init ddp-num-buckets
    ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation nccl-* sharp-*
torchrun gives the rank through the environment; start the program with torchrun
    local-rank local_rank
this program trains only; load the checkpoint into Megatron-LM's server for inference
    inference-batch-times-seqlen-threshold inference-max-requests inference-max-seq-length
    inference-max-batch-size inference-dynamic-batching inference-rng-tracker max-tokens-to-oom
    flash-decode symmetric-ar-type nccl-all-reduce-for-prefill mlp-chunks-for-prefill
    disable-chunked-prefill decode-only-cuda-graphs use-legacy-static-engine inference-*
    mlp-chunks-*
this program pre-trains only, without reinforcement learning or instruction tuning; drop the flag
    perform-rl-step rl-prompts-per-eval sft-tokenizer-prompt-format rl-* grpo-* langrl-*
    sft-*
metrics go to the log and to TensorBoard; use --tensorboard-dir
    wandb-project wandb-entity wandb-exp-name wandb-save-dir no-one-logger one-logger-project
    one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version enable-one-logger
    log-energy log-progress config-logger-dir mlflow-tracking-uri wandb-* one-logger-* app-tag-*
    mlflow-*
slow ranks show in this trainer's own traces; use --trace-dir
    log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count
    run-workload-inspector-server straggler-*
fault tolerance is torchrun's restarts and checkpoints; use --save and --load
    enable-ft-package calc-ft-timeouts inprocess-restart adlr-autoresume
    adlr-autoresume-interval error-injection-rate error-injection-type rerun-mode
    result-rejected-tracker-filename iterations-to-skip replication replication-jump
    replication-factor check-for-spiky-loss check-for-large-grads
    check-weight-hash-across-dp-replicas-interval inprocess-* ft-* adlr-* error-injection-*
    replication-*
checkpoints are written into --save as torch_dist by the ranks themselves; drop the flag
    use-persistent-ckpt-worker save-retain-interval ckpt-assume-constant-structure
    dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
    distrib-optim-fully-reshardable-mem-efficient async-ckpt-*
checkpoints on the nodes' own disks are on their way to --save; use --save-local
    non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
    non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo non-persistent-*
a checkpoint is loaded as torch_dist and must fit the flags; use --load
    auto-detect-ckpt-format dist-ckpt-format dist-ckpt-strictness ckpt-convert-format
    ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format pretrained-checkpoint
    load-main-params-from-ckpt use-checkpoint-args use-mp-args-from-checkpoint-args
    no-use-tokenizer-model-from-checkpoint-args ckpt-convert-*
only the tokenizers GPT2BPETokenizer and NullTokenizer are built; see --tokenizer-type
    tokenizer-model tokenizer-metadata tiktoken-pattern tiktoken-num-special-tokens
    tiktoken-special-tokens legacy-tokenizer trust-remote-code padded-vocab-size special-tokens
    tiktoken-* null-tokenizer-* sentencepiece-*
data is read from local files; copy it and use --data-path
    disable-msc enable-msc object-storage-cache-path msc-* object-storage-*
each split has a flag of its own; use --train-data-path, --valid-data-path and --test-data-path
    per-split-data-args-path per-dataset-sequences-path
validation uses --eval-iters batches of one mixed dataset; drop the flag
    full-validation multiple-validation-sets test-mode
samples are packed whole from the documents; drop the flag
    mid-level-dataset-surplus allow-ambiguous-pad-tokens fim-data fim-rate fim-*
the batch size stays as given; choose --global-batch-size to fit the world size
    decrease-batch-size-if-needed
the loss is the mean over each microbatch; drop the flag
    calculate-per-token-loss
weights are drawn from one normal distribution, equal on all copies; use --init-method-std
    data-parallel-random-init embedding-init-method-std init-method-xavier-uniform
layers come from --transformer-impl local or transformer_engine; use it
    spec use-legacy-models no-clone-scatter-output-in-embedding
results repeat with the same --seed on the same machine; drop the flag
    deterministic-mode batch-invariant-mode
device memory is left to PyTorch; see --log-memory-to-tensorboard
    record-memory-history memory-snapshot-path empty-unused-memory-level train-sync-interval
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


@dataclass(frozen=True)
class Family:
    """Flags that are refused for one reason.

    Attributes:
        reason: why, and what to do instead.
        flags: the names, without leading dashes.
        prefixes: beginnings that cover the rest of the family, likewise.
    """

    reason: str
    flags: tuple[str, ...]
    prefixes: tuple[str, ...]


def _families() -> Iterator[Family]:
    reason = ""
    for is_flags, lines in groupby(_TABLE.splitlines(), key=lambda line: line.startswith(" ")):
        text = " ".join(line.strip() for line in lines)
        if not is_flags:
            reason = text
            continue
        names = [name for name in text.split() if not name.endswith("*")]
        prefixes = [name[:-1] for name in text.split() if name.endswith("*")]
        yield Family(reason, tuple(names), tuple(prefixes))


FAMILIES = tuple(_families())


def reason_for(name: str) -> str | None:
    """Returns why a flag of Megatron-LM is refused, ``None`` if it is not known to be one.

    Args:
        name: the flag with its dashes.
    """
    bare = name.removeprefix("--")
    by_name = (family for family in FAMILIES if bare in family.flags)
    by_prefix = (family for family in FAMILIES if bare.startswith(family.prefixes))
    found = next(by_name, None) or next(by_prefix, None)
    return None if found is None else found.reason


def refused_flags() -> tuple[str, ...]:
    """Every flag that is refused by its full name, with dashes."""
    return tuple("--" + name for family in FAMILIES for name in family.flags)
