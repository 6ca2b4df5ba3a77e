"""Lists the flags of Megatron-LM in two versions.

One version is the release with megatron-core 0.15. The other contains the flags on the branches
main and dev in August 2026.
"""

_NAMES = """
num-layers encoder-num-layers decoder-num-layers hidden-size ffn-hidden-size num-attention-heads
attention-backend kv-channels group-query-attention num-query-groups softmax-type window-size
window-attn-skip-freq max-position-embeddings position-embedding-type relative-attention-num-buckets
relative-attention-max-distance use-rotary-position-embeddings rotary-base rotary-percent
rotary-interleaved rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor
no-rope-freq no-position-embedding mrope-section make-vocab-size-divisible-by normalization
norm-epsilon apply-layernorm-1p apply-residual-connection-post-layernorm openai-gelu squared-relu
swiglu quick-geglu activation-func-clamp-value glu-linear-offset onnx-safe bert-no-binary-head
untie-embeddings-and-output-weights multi-latent-attention mtp-num-layers mtp-loss-scaling-factor
qk-layernorm qk-l2-norm init-method-std embedding-init-method-std init-method-xavier-uniform
attention-dropout hidden-dropout micro-batch-size batch-size global-batch-size rampup-batch-size
decrease-batch-size-if-needed recompute-activations recompute-granularity
no-check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads
distribute-saved-activations recompute-method recompute-num-layers recompute-modules
cpu-offloading-num-layers no-clone-scatter-output-in-embedding profile profile-step-start
profile-step-end iterations-to-skip result-rejected-tracker-filename disable-gloo-process-groups
use-pytorch-profiler profile-ranks record-memory-history memory-snapshot-path tp-comm-overlap
tp-comm-overlap-cfg disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad tp-comm-bootstrap-backend
use-cpu-initialization empty-unused-memory-level deterministic-mode
check-weight-hash-across-dp-replicas-interval calculate-per-token-loss train-sync-interval
checkpoint-activations train-iters train-samples log-interval exit-interval exit-duration-in-mins
exit-signal-handler tensorboard-dir no-masked-softmax-fusion no-bias-gelu-fusion
no-bias-swiglu-fusion use-fused-weighted-squared-relu no-bias-dropout-fusion no-rope-fusion
rope-type cross-entropy-loss-fusion cross-entropy-fusion-impl use-flash-attn disable-bias-linear
add-qkv-bias optimizer optimizer-cpu-offload optimizer-offload-fraction
use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d dump-param-to-param-group-map
no-pin-cpu-grads no-pin-cpu-params dataloader-type no-async-tensor-model-parallel-allreduce
no-persist-layer-norm sequence-parallel no-gradient-accumulation-fusion use-mcore-models
use-legacy-models manual-gc manual-gc-interval no-manual-gc-eval disable-tp-comm-split-ag
disable-tp-comm-split-rs pipeline-model-parallel-comm-backend high-priority-stream-groups
use-te-activation-func error-injection-rate error-injection-type rerun-mode seed
data-parallel-random-init weight-decay start-weight-decay end-weight-decay weight-decay-incr-style
clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum muon-momentum muon-no-split-qkv
muon-use-nesterov muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode
muon-extra-scale-factor lr lr-decay-style lr-wsd-decay-style lr-decay-iters lr-decay-samples
lr-wsd-decay-samples lr-wsd-decay-iters lr-warmup-fraction lr-warmup-iters lr-warmup-samples
lr-warmup-init warmup min-lr override-opt_param-scheduler override-opt-param-scheduler
use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler decoupled-lr decoupled-min-lr
use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype save
save-interval persistent-save-interval save-retain-interval no-save-optim no-save-rng load
no-load-optim load-main-params-from-ckpt no-load-rng no-strict-fsdp-dtensor-load
non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo finetune pretrained-checkpoint
ckpt-step no-initialization use-checkpoint-args use-mp-args-from-checkpoint-args
no-use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint use-dist-ckpt
use-persistent-ckpt-worker auto-detect-ckpt-format dist-ckpt-format ckpt-format ckpt-convert-format
ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-fully-parallel-save
no-ckpt-fully-parallel-save async-save ckpt-fully-parallel-load ckpt-assume-constant-structure
dist-ckpt-strictness dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
distrib-optim-fully-reshardable-mem-efficient fp16 bf16 grad-reduce-in-bf16 loss-scale
initial-loss-scale min-loss-scale loss-scale-window hysteresis fp32-residual-connection
apply-query-key-layer-scaling attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32
fp16-lm-cross-entropy disable-bf16-reduced-precision-matmul reuse-grad-buf-for-mxfp8-param-ag
fp8-format fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len
fp8-amax-compute-algo no-fp8-wgrad transformer-impl fp8-param-gather first-last-layers-bf16
num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp4-format fp4-recipe fp4-quantizer-factory
fp4-param-gather te-rng-tracker inference-rng-tracker kitchen-config-file kitchen-recipe-number
tensor-model-parallel-size pipeline-model-parallel-size decoder-first-pipeline-num-layers
decoder-last-pipeline-num-layers pipeline-model-parallel-layout model-parallel-size
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
microbatch-group-size-per-virtual-pipeline-stage no-overlap-p2p-communication
overlap-p2p-communication-warmup-flush distributed-backend distributed-timeout-minutes
distributed-timeout-seconds-after-init overlap-grad-reduce defer-embedding-wgrad-compute
wgrad-deferral-limit no-align-grad-reduce ddp-num-buckets ddp-bucket-size
ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
ddp-average-in-collective overlap-param-gather overlap-param-gather-with-optimizer-step
no-align-param-gather no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p local-rank
lazy-mpu-init account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
use-distributed-optimizer use-nccl-ub disable-symmetric-registration use-sharp sharp-enabled-group
use-megatron-fsdp init-model-with-meta-device data-parallel-sharding-strategy
no-gradient-reduce-div-fusion fsdp-double-buffer suggested-communication-unit-size
keep-fp8-transpose-cache enable-full-sharding-in-hsdp num-distributed-optimizer-instances
use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward context-parallel-size cp-comm-type
hierarchical-context-parallel-sizes nccl-communicator-config-path use-tp-pp-dp-mapping replication
replication-jump replication-factor full-validation multiple-validation-sets eval-iters
eval-interval test-mode skip-train vocab-size padded-vocab-size vocab-file merge-file
vocab-extra-ids tokenizer-type tokenizer-model tokenizer-metadata tiktoken-pattern
tiktoken-num-special-tokens tiktoken-special-tokens legacy-tokenizer trust-remote-code data-path
split train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path
data-cache-path no-mmap-bin-files mock-data seq-length encoder-seq-length decoder-seq-length
retriever-seq-length sample-rate mask-prob short-seq-prob num-workers reset-position-ids
reset-attention-mask eod-mask-loss no-create-attention-mask-in-dataloader
num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus
allow-ambiguous-pad-tokens disable-msc log-params-norm log-num-zeros-in-grad log-throughput
log-progress timing-log-level log-energy no-barrier-with-level-1-timing timing-log-option
tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
log-world-size-to-tensorboard wandb-project wandb-entity wandb-exp-name wandb-save-dir logging-level
log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count
run-workload-inspector-server no-one-logger one-logger-project one-logger-run-name one-logger-async
app-tag-run-name app-tag-run-version config-logger-dir inprocess-restart inprocess-max-iterations
inprocess-monitor-thread-interval inprocess-heartbeat-interval inprocess-soft-timeout
inprocess-granularity inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts adlr-autoresume
adlr-autoresume-interval perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size
langrl-env-config rl-use-sequence-packing rl-partial-rollouts inference-batch-times-seqlen-threshold
max-tokens-to-oom output-bert-embeddings bert-embedder-type flash-decode enable-cuda-graph
cuda-graph-warmup-steps external-cuda-graph cuda-graph-impl cuda-graph-scope
use-legacy-static-engine inference-max-requests inference-max-seq-length inference-max-batch-size
inference-dynamic-batching inference-dynamic-batching-block-size decode-only-cuda-graphs
symmetric-ar-type nccl-all-reduce-for-prefill mlp-chunks-for-prefill disable-chunked-prefill
inference-wandb-logging-step-interval retro-project-dir retro-add-retriever retro-num-neighbors
retro-no-verify-neighbor-count ict-head-size biencoder-projection-dim
biencoder-shared-query-context-model ict-load bert-load titles-data-path query-in-block-prob
use-one-sent-docs evidence-data-path retriever-report-topk-accuracies retriever-score-scaling
block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes img-h img-w
num-channels patch-dim classes-fraction data-per-class-fraction no-data-sharding head-lr-mult
vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type mask-type
mask-factor iter-per-epoch dino-local-img-size dino-teacher-temp expert-model-parallel-size
expert-tensor-parallel-size num-experts moe-layer-freq moe-ffn-hidden-size moe-shared-expert-overlap
moe-grouped-gemm moe-extended-tp moe-router-load-balancing-type moe-router-topk moe-aux-loss-coeff
moe-z-loss-coeff moe-token-dispatcher-type moe-enable-deepep moe-permute-fusion
moe-expert-capacity-factor overlap-moe-expert-parallel-comm delay-wgrad-compute
moe-upcycling-granularity q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
rotary-scaling-factor mscale mscale-all-dim cache-mla-latents heterogeneous-layers-config-path
heterogeneous-layers-config-encoded-json enable-experimental spec hybrid-attention-ratio
hybrid-mlp-ratio hybrid-override-pattern mamba-state-dim mamba-head-dim mamba-num-groups
mamba-num-heads is-hybrid-model disable-mamba-mem-eff-path yaml-cfg sft sft-tokenizer-prompt-format
"""

_LATER = """
activation-offload-fraction async-strategy batch-invariant-backend chat-template
chunked-optimizer-state-offload ckpt-drop-redundant-extra-state
ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group
ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path cp-partition-mode create-all-gather-group
csa-compress-ratios csa-compress-rotary-base csa-dense-mode csa-window-size
dataloader-defer-npy-index-mmap dataloader-fast-cache-load dataloader-inter-document-masking
ddp-param-name-patterns-for-fp32-local-accumulation delay-offload-until-cuda-graph
delta-offload-bytes-across-pp-ranks dense-grouped-gemm disable-grad-buffers-cpu-backup
disable-jit-fuser disable-param-buffers-cpu-backup dist-ckpt-workers dynamic-context-parallel
enable-chunked-prefill enable-hyper-connections enable-mhc-connections eval-global-batch-size
eval-micro-batch-size exit-signal exit-signal-handler-for-dataloader
exit-signal-handler-for-training expert-tensor-parallel-num-weight-shards fake-process-group
fallback-to-eager-attn fine-grained-offloading-max-inflight-offloads flash-attention-version
flight-recorder-dump-path flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
freeze-all-layers fused-residual-rmsnorm gdn-conv-pad-alignment gdn-pre-gated-delta-rule-fusion
gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder gpu-sniff-test-interval
grad-norm-skip-threshold gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
gtp-remat-reduce-scatter-with-fp32-accumulation head-wise-attn-gate high-priority-a2a-comm-stream
lion-beta1 lion-beta2 log-device-memory-used log-memory-interval log-moe-overload-factor
logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
logits-save-top-k logits-save-top-p logits-save-top-p-min-k max-seqlen-per-dp-cp-rank
mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
min-dynamic-context-parallel-size mla-down-proj-fusion moe-combine-bwd-dtype moe-dispatch-fwd-dtype
moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing
moe-hybridep-pad-uneven-dispatch-inputs moe-hybridep-pad-variable-tokens moe-mlp-glu-interleave-size
moe-n-hash-layers moe-ncclep-static-shape moe-ncclep-use-symm-mem moe-ncclep-zero-copy
moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-permute-fusion-into-hybridep
moe-router-force-biased moe-router-quantile-balancing-ema moe-routing-trace-capture-hidden-states
moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
moe-routing-trace-path moe-shared-expert-glu-interleave-size moe-single-grouped-bias
moe-single-grouped-weight moe-use-grouped-tensor mrope-interleaved mtp-detach-heads mtp-hsm
mtp-hybrid-override-pattern mtp-standalone mtp-use-repeated-layer mup-attn-scale-power
mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult
no-ckpt-load-validate-sharding-integrity no-dsa-indexer-rotate-activation
no-dsa-indexer-scoring-relu no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
no-flight-recorder-include-only-active no-pad-vocab-size no-save-tokenizer-assets
no-stream-ckpt-dequant no-tokenizer-sentencepiece-ignore-extra-whitespaces
no-use-layer-wise-param-layout no-weight-decay-cond-type no-yarn-correction-range-round-to-int
num-residual-streams num-speculative-tokens nvtx-ranges o-groups o-lora-rank
offload-optimizer-states optimizer-cuda-graph optimizer-state-offload-chunk-size-mb
optimizer-state-offload-fraction otel-enabled otel-service-name otel-span-groups output-logit-dtype
overlap-dispatch-backward-with-experts-wgrad override-ckpt-iteration pad-packed-seq-alignment
phase-transition-iterations pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
pytorch-profiler-collect-shapes record-shapes refit-method rotary-base-per-layer
save-activations-interval save-dgrads-interval save-params-interval save-tokens-per-expert-interval
save-wgrads-interval sequence-packing-scheduler start-eval-at-iter step-batch-size-schedule
tensor-parallel-num-weight-shards thd-max-packed-sequences thd-tail-padding-policy
tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy
tokenizer-special-tokens use-fused-mhc use-gigatoken use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-kitchen-attention use-layer-wise-distributed-optimizer
use-layer-wise-param-layout use-mup use-same-sampling-seed-across-dp-ranks
use-transformer-engine-op-fuser use-varlen-dataset validation-set-names
varlen-mock-dataset-config-json varlen-sbhd-validation verify-integrity yarn-beta-fast
yarn-beta-slow yarn-correction-range-round-to-int yarn-original-max-position-embeddings
"""

ALL = tuple("--" + name for name in (_NAMES + _LATER).split())
