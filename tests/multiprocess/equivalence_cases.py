"""Defines the jobs of ``test_equivalence.py``: models, parallel sizes, schedules and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import package_info

from .free_orders import ORIGINS
from .launch import SMALL_GPT, UNLIKE_LAYERS
from .variants import OTHER_SUMS

STEPS = 3
# Cases that test additional options take this number of steps. Every case computes the validation
# loss after this number of steps.
SHORT_STEPS = 2

BASE = f"{SMALL_GPT} --num-layers 8 --train-iters 3"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
# MODERN has features that modern models have, and that GPT-2 lacks.
MODERN = (
    f"{NO_DROPOUT} --untie-embeddings-and-output-weights --position-embedding-type rope --swiglu "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --disable-bias-linear"
)
# LENGTHS uses documents with 20 to 80 tokens, which are truncated if they exceed the sequence
# length.
LENGTHS = f"{NO_DROPOUT} --variable-seq-lengths --seq-length 72 --max-position-embeddings 72"
MODERN_LENGTHS = f"{MODERN} {LENGTHS}"
# TIED_MTP has one multi-token prediction layer and a tied embedding.
TIED_MTP = f"{NO_DROPOUT} --position-embedding-type rope --mtp-num-layers 1"
MTP_LENGTHS = f"{TIED_MTP} {LENGTHS}"
# Since megatron-core 0.17, the losses of multi-token prediction are weighted by a microbatch's
# number of documents per token, so packing changes these losses.
MAY_PACK_PREDICTIONS = (package_info.MAJOR, package_info.MINOR) < (0, 17)
# Since megatron-core 0.17, grouped experts require Transformer Engine.
GROUPED = "--moe-grouped-gemm" if (package_info.MAJOR, package_info.MINOR) < (0, 17) else ""
# DEEPSEEK has latent attention, predicts two more tokens, and weights the loss by tokens.
DEEPSEEK = (
    f"{NO_DROPOUT} --untie-embeddings-and-output-weights --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --multi-latent-attention --q-lora-rank 8 "
    "--kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --mtp-num-layers 2 "
    "--calculate-per-token-loss --eod-mask-loss"
)
# DEEPSEEK_EXPERTS adds a shared expert, and experts that are balanced by the router's bias.
DEEPSEEK_EXPERTS = (
    f"{DEEPSEEK} --num-experts 8 --moe-layer-freq [0]+[1]*7 --moe-ffn-hidden-size 16 "
    "--moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 16 --moe-router-load-balancing-type none"
)
# GEMMA has norms after attention and MLP, capped logits, and sliding windows with a different
# rotary base.
GEMMA = (
    f"{NO_DROPOUT} --position-embedding-type rope --geglu --normalization RMSNorm "
    "--disable-bias-linear --apply-layernorm-1p --scale-embeddings --norm-block-outputs "
    "--qk-layernorm --attention-softcap 2 --logit-softcap 3 --softmax-scale 0.3 --window-size 4,0 "
    "--window-attn-skip-freq ([1]*3+[0])*2 --window-rotary-base 100"
)
GEMMA_LENGTHS = f"{GEMMA} {LENGTHS}"
# LONG has sequences that are long enough to be split into slices.
LONG = f"{NO_DROPOUT} --seq-length 64 --max-position-embeddings 64"
MODERN_LONG = f"{MODERN} {LONG}"
# WINDOWS_LONG has sliding windows in three of four layers. A window is longer than a slice.
WINDOWS_LONG = f"{MODERN_LONG} --window-size 20,0 --window-attn-skip-freq 4"
LATENT_LONG = DEEPSEEK_EXPERTS.replace("--mtp-num-layers 2 ", LONG.replace(NO_DROPOUT, "") + " ")
GEMMA_LONG = f"{GEMMA} {LONG} --calculate-per-token-loss --eod-mask-loss"
# WINDOWS has sliding windows in three of four layers.
WINDOWS = f"{MODERN} --window-size 4,0 --window-attn-skip-freq 4"
# UNLIKE has four kinds of layers, each used twice: other widths, no attention, linear attention,
# and no MLP.
UNLIKE = f"{MODERN} {UNLIKE_LAYERS}"
# EXPERTS has experts in three of four layers, with biases as in GPT-2. MODERN_EXPERTS has experts
# in modern layers.
EXPERTS = (
    f"{NO_DROPOUT} --num-experts 4 --moe-layer-freq ([0]+[1]*3)*2 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001 --moe-ffn-hidden-size 48"
)
MODERN_EXPERTS = (
    f"{MODERN} --num-experts 8 --moe-layer-freq [0]+[1]*7 --moe-ffn-hidden-size 32 "
    "--moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 3 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 32"
)
# EXPERT_LENGTHS has no auxiliary loss, because this loss depends on how documents are distributed
# to microbatches.
EXPERT_LENGTHS = (
    f"{MODERN_LENGTHS} --num-experts 4 --moe-layer-freq ([0]+[1]*3)*2 --moe-ffn-hidden-size 48 "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
)
# DEEP_EXPERTS combines experts, latent attention and multi-token prediction.
DEEP_EXPERTS = (
    f"{NO_DROPOUT} --disable-bias-linear --position-embedding-type rope --multi-latent-attention "
    "--mtp-num-layers 1 --num-experts 4 --moe-layer-freq [0]+[1]*7 --moe-aux-loss-coeff 0.01"
)
# FULL_EXPERTS drops tokens beyond an expert's capacity. The number of these tokens does not depend
# on the parallel sizes.
FULL_EXPERTS = (
    f"{EXPERTS} --moe-expert-capacity-factor 0.7 --moe-pad-expert-input-to-capacity "
    "--calculate-per-token-loss"
)
MODEL_NAMES = {
    NO_DROPOUT: "",
    DROPOUT: "dropout",
    MODERN: "modern",
    LENGTHS: "lengths",
    MODERN_LENGTHS: "modern-lengths",
    TIED_MTP: "tied-mtp",
    MTP_LENGTHS: "mtp-lengths",
    DEEPSEEK: "deepseek",
    GEMMA: "gemma",
    GEMMA_LENGTHS: "gemma-lengths",
    WINDOWS: "windows",
    UNLIKE: "unlike",
    LONG: "long",
    MODERN_LONG: "modern-long",
    WINDOWS_LONG: "windows-long",
    GEMMA_LONG: "gemma-long",
    LATENT_LONG: "latent-long",
    DEEPSEEK_EXPERTS: "deepseek-experts",
    EXPERTS: "experts",
    MODERN_EXPERTS: "modern-experts",
    EXPERT_LENGTHS: "expert-lengths",
    FULL_EXPERTS: "full-experts",
    DEEP_EXPERTS: "deep-experts",
}
LOOP, V = "--pipeline-placement loop", "--pipeline-placement v"
SEQUENCE = "--sequence-parallel"
SPREAD = "--expert-model-parallel-size 2"
GATHER, EXCHANGE = (f"--moe-token-dispatcher-type {kind}" for kind in ("allgather", "alltoall"))
LAYOUT = "--pipeline-model-parallel-layout"
RECOMPUTED = "--recompute-granularity full --recompute-method"
RECOMPUTE = f"{RECOMPUTED} uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Case:
    """Job to train.

    Attributes:
        schedule: Name of the schedule.
        tp, pp, chunks, dp, cp: Parallel sizes, and number of chunks per rank.
        extra: Additional flags.
        model: Flags that change the results. The reference job has the same flags.
        run: Number that distinguishes repeated runs of the same job.
        after: Job from whose checkpoint this job continues.
        until: Last iteration, or 0 to derive the last iteration from the other attributes.
        variant: Order of summation, or an error that is added to a single process. See
            ``variants.py``.
    """

    schedule: str
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    extra: str = ""
    model: str = NO_DROPOUT
    run: int = 1
    after: Case | None = None
    until: int = 0
    cp: int = 1
    variant: str = ""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def steps(self) -> int:
        if self.until:
            return self.until
        return STEPS if self.model == NO_DROPOUT and not self.extra else SHORT_STEPS

    @property
    def reference(self) -> Case:
        # The reference has a single microbatch with all documents, which is valid because the loss
        # never includes padding.
        at_once = "--micro-batch-size 8" if "--variable-seq-lengths" in self.model else ""
        until = self.until if self.until > SHORT_STEPS else 0
        return Case("megatron", model=self.model, extra=at_once, until=until)

    def __str__(self) -> str:
        """Returns the name of the case, which is also the name of its test."""
        parts = [f"tp{self.tp}-pp{self.pp}-chunks{self.chunks}-dp{self.dp}-{self.schedule}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [MODEL_NAMES[self.model], *self.extra.replace("--", "").split()]
        parts += [f"run{self.run}"] if self.run > 1 else []
        parts += [f"until{self.until}"] if self.until else []
        parts += [f"after-{self.after}"] if self.after else []
        parts += [self.variant] if self.variant else []
        return "-".join(word for word in parts if word)

    def to_json(self) -> dict[str, Any]:
        """Returns the case in the format that ``worker.py`` reads."""
        flags = f"{BASE} {self.model} {self.extra} --pipeline-schedule {self.schedule}".split()
        flags += ["--tensor-model-parallel-size", str(self.tp)]
        flags += ["--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--context-parallel-size", str(self.cp)]
        if self.chunks > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)]
        return {
            "name": str(self),
            "flags": flags,
            "steps": self.steps,
            "evaluate_after": SHORT_STEPS,
            "after": str(self.after) if self.after else None,
            "variant": self.variant,
        }


def same(first: Case, *others: dict[str, Any]) -> tuple[Case, ...]:
    """Returns ``first``, and a copy of it for each dict of replaced attributes in ``others``."""
    return (first, *(dataclasses.replace(first, **other) for other in others))


def every_shape() -> Iterator[Case]:
    """Yields all combinations of parallel sizes for up to four processes, with each schedule."""
    for tp in (1, 2):
        for pp in (1, 2, 4):
            for dp in (1, 2):
                if tp * pp * dp > 4:
                    continue
                for chunks in (1, 2) if pp > 1 else (1,):
                    static = "1f1b" if chunks == 1 else "interleaved"
                    for schedule in ("megatron", static, "adaptive"):
                        yield Case(schedule, tp, pp, chunks, dp)


PLAIN = Case("megatron")
SHAPES = tuple(every_shape())
OPTIONS = (
    # These partitions have stages without layers, which contain only the embedding, only the loss,
    # or nothing.
    Case("adaptive", pp=2, extra="--partition 0-8"),
    Case("adaptive", pp=4, extra="--partition 0-5-3-0"),
    Case("1f1b", pp=4, extra="--partition 3-0-4-1"),
    Case("adaptive", pp=2, chunks=2, extra="--partition 3-0-5-0"),
    Case("interleaved", pp=2, chunks=2, extra="--partition 0-4-0-4"),
    # A low activation cap forces an order of actions that differs from every static schedule.
    Case("adaptive", pp=4, extra="--activation-cap 1"),
    Case("adaptive", pp=2, chunks=2, extra="--activation-cap 1"),
    Case("adaptive", pp=4, chunks=2, extra="--activation-cap 1.5"),
    Case("adaptive", tp=2, pp=2, chunks=2, extra="--activation-cap 1"),
    # These jobs split the same samples into microbatches of different sizes.
    Case("adaptive", pp=2, extra="--micro-batch-size 2"),
    Case("1f1b", pp=2, dp=2, extra="--micro-batch-size 4"),
    Case("adaptive", pp=2, chunks=2, extra=RECOMPUTE),
    Case("adaptive", tp=2, pp=2, extra=RECOMPUTE),
    Case("adaptive", tp=2, pp=2, extra=f"{RECOMPUTE} --distribute-saved-activations"),
    Case("zb-h1", tp=2, pp=2, extra=f"{RECOMPUTE} --distribute-saved-activations"),
    # If reductions overlap with backward passes, gradients must still be complete when they are
    # reduced.
    Case("adaptive", dp=2, extra="--overlap-grad-reduce"),
    Case("adaptive", dp=2, extra="--use-distributed-optimizer"),
    Case(
        "adaptive",
        pp=2,
        dp=2,
        extra="--overlap-grad-reduce --use-distributed-optimizer --split-backward True",
    ),
    Case("adaptive", pp=2, dp=2, extra="--overlap-grad-reduce --no-align-grad-reduce"),
    Case("adaptive", pp=2, chunks=2, dp=2, extra="--overlap-grad-reduce"),
    Case(
        "interleaved",
        pp=2,
        chunks=2,
        dp=2,
        extra="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Case("1f1b", pp=4, model=DROPOUT),
    Case("adaptive", pp=2, chunks=2, model=DROPOUT, extra=f"{RECOMPUTE} --split-backward True"),
    Case("megatron", pp=2, model=MODERN),
    Case("adaptive", pp=2, chunks=2, model=MODERN),
    Case("adaptive", tp=2, pp=2, model=MODERN),
    Case("adaptive", pp=4, model=MODERN, extra="--partition 0-5-3-0"),
)
# ORDERS covers the schedules that SHAPES lacks, with split and with unsplit backward passes.
WHOLE = "--split-backward False"
ORDERS = (
    Case("gpipe", pp=2),
    Case("gpipe", pp=2, chunks=2, extra=V),
    Case("breadth-first", pp=2, chunks=2, dp=2),
    Case("zb-h1", pp=4),
    Case("zb-h1", tp=2, pp=2),
    Case("zb-h1", pp=2, dp=2, extra="--overlap-grad-reduce --use-distributed-optimizer"),
    Case("zb-v", pp=2, chunks=2),
    Case("zb-v", pp=4, chunks=2, model=MODERN),
    Case("zb-v", pp=2, chunks=2, dp=2, extra="--overlap-grad-reduce"),
    Case("v-half", pp=4, chunks=2),
    Case("varuna", pp=4, extra=RECOMPUTE),
    Case("hinted", pp=4, chunks=2, extra="--activation-cap 4"),
    Case("hinted", tp=2, pp=2, chunks=2, extra="--activation-cap 2"),
    Case("hinted", pp=4, extra="--activation-cap 2"),
    Case("dfc", pp=2, chunks=2),
    Case("bfc", pp=2, chunks=2, extra="--split-backward True --weight-pieces 3"),
    Case("adaptive", pp=4, chunks=2, extra="--weight-pieces 1"),
    Case("adaptive", pp=2, chunks=2, extra=f"{V} {WHOLE}"),
    Case("adaptive", tp=2, pp=2, extra=WHOLE),
    Case("adaptive", pp=2, chunks=2, extra=LOOP),
    Case("adaptive", pp=4, chunks=2, extra=f"{LOOP} --activation-cap 1"),
)
FREE = tuple(
    Case(
        "file",
        pp=2,
        chunks=2,
        extra=f"{V if file.startswith('v') else LOOP} --schedule-file {file}",
    )
    for file in ORIGINS
)
# The cases in SHAPES use the default transport, shared memory. With few small slots, receivers copy
# messages, and long messages are split.
FEW = "--micro-batch-size 2 --transport-slot-bytes 4096 --transport-slots 2"
TRANSPORTED = tuple(
    dataclasses.replace(case, extra=f"--transport {kind} {case.extra}".strip())
    for kind in ("shm", "tcp", "gloo")
    for case in (
        Case("1f1b", pp=4),
        Case("adaptive", pp=2, chunks=2, dp=2),
        Case("adaptive", tp=2, pp=2, extra="--transport-slots 2"),
        Case("gpipe", pp=2, extra=FEW),
        Case("zb-v", pp=2, chunks=2, extra=f"{FEW} --transport-crc"),
        Case("interleaved", pp=2, chunks=2, extra=FEW),
    )
    if kind != "shm" or case.extra
)
# The first rank of a V placement with two chunks has the first and the last stage. If there are
# three chunks, the last stage is on the last rank.
PLACED = (
    Case("adaptive", pp=2, chunks=2, extra=V),
    Case("adaptive", pp=2, chunks=2, extra=V, model=MODERN),
    Case("adaptive", pp=2, chunks=2, extra=f"{V} --partition 0-5-3-0 --activation-cap 1"),
    Case("adaptive", pp=2, chunks=3, extra=f"{V} --partition 2-1-0-3-1-1"),
    Case("adaptive", pp=4, chunks=2, extra=V),
    Case("adaptive", tp=2, pp=2, chunks=2, extra=V),
    Case("adaptive", tp=2, pp=2, chunks=2, extra=V, model=MODERN),
    Case("adaptive", pp=2, chunks=2, dp=2, extra=V, model=MODERN),
    Case(
        "adaptive", pp=2, chunks=2, dp=2, extra=f"{V} --overlap-grad-reduce --split-backward True"
    ),
    Case(
        "adaptive",
        pp=2,
        chunks=2,
        dp=2,
        extra=f"{V} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
)
PACK, BALANCED = "--pack-to 100", "--balance-replicas both"
DIFFERENT_LENGTHS = tuple(
    Case(*positional, **shape, model=model)  # type: ignore[arg-type]
    for model, positional, shape in (
        (LENGTHS, ("1f1b",), {"pp": 2, "extra": PACK}),
        (LENGTHS, ("adaptive",), {"pp": 2, "chunks": 2, "extra": f"{V} {PACK}"}),
        (LENGTHS, ("interleaved",), {"pp": 2, "chunks": 2, "extra": f"{PACK} {RECOMPUTE}"}),
        (LENGTHS, ("megatron",), {"pp": 2, "extra": PACK}),
        (LENGTHS, ("adaptive",), {"pp": 2, "extra": "--micro-batch-size 2 --transport gloo"}),
        (MODERN_LENGTHS, ("adaptive",), {"tp": 2, "extra": PACK}),
        (LENGTHS, ("adaptive",), {"pp": 2, "dp": 2, "extra": PACK}),
        (LENGTHS, ("1f1b",), {"pp": 2, "dp": 2, "extra": f"{PACK} --use-distributed-optimizer"}),
        (LENGTHS, ("adaptive",), {"pp": 2, "dp": 2, "extra": "--micro-batch-size 2"}),
        (MODERN_LENGTHS, ("1f1b",), {"pp": 2, "dp": 2}),
        (MODERN_LENGTHS, ("adaptive",), {"pp": 4, "extra": PACK}),
        (MTP_LENGTHS, ("adaptive",), {"pp": 2, "extra": PACK}),
        (LENGTHS, ("adaptive",), {"pp": 2, "dp": 2, "extra": f"{PACK} --balance-replicas off"}),
        (LENGTHS, ("interleaved",), {"pp": 2, "chunks": 2, "dp": 2, "extra": f"{PACK} {BALANCED}"}),
        (LENGTHS, ("combined-1f1b",), {"pp": 2, "chunks": 2, "extra": PACK}),
        (LENGTHS, ("1f1b",), {"dp": 2, "extra": f"{PACK} {BALANCED}"}),
    )
    if model != MTP_LENGTHS or MAY_PACK_PREDICTIONS
)
DEALT = (
    Case("1f1b", dp=2, extra=f"{BALANCED} --overlap-grad-reduce --use-distributed-optimizer"),
    Case("zb-h1", pp=2, dp=2, extra=f"{BALANCED} --overlap-grad-reduce"),
)
OVERLAP = "--overlap-moe-expert-parallel-comm"
EACH = "--expert-tensor-parallel-size 1"
# TODAY combines pairs of features of modern models: latent attention, multi-token prediction,
# layouts and context parallelism. Backward passes are split or unsplit, and stages are placed in a
# loop or in a V.
TODAY = (
    Case("adaptive", pp=2, chunks=2, extra=V, model=TIED_MTP),
    Case("megatron", pp=2, chunks=2, model=TIED_MTP),
    Case("interleaved", pp=2, chunks=2, model=DEEPSEEK, extra=f"{LAYOUT} E*1|tttt|(tt)*2|mmL"),
    Case("1f1b", pp=2, dp=2, model=TIED_MTP, extra="--use-distributed-optimizer"),
    Case("adaptive", pp=2, chunks=2, extra=f"{V} {WHOLE}", model=DEEPSEEK),
    Case("adaptive", pp=2, cp=2, model=DEEPSEEK),
    Case("adaptive", tp=2, model=TIED_MTP, extra=SEQUENCE),
    Case("zb-v", tp=2, pp=2, chunks=2, model=DEEPSEEK, extra=SEQUENCE),
    Case("zb-h1", pp=4, model=DEEPSEEK, extra=f"{LAYOUT} Et*3|t*5|mm|L"),
    Case("megatron", pp=4, model=TIED_MTP, extra=f"{LAYOUT} Et*3|t*5|m|L"),
    Case("adaptive", pp=4, model=TIED_MTP, extra=f"{LAYOUT} Et*3|t*5|m|L"),
    Case("megatron", tp=2, pp=2, model=DEEPSEEK),
    Case("adaptive", pp=2, chunks=2, extra=f"{V} {EXCHANGE}", model=DEEPSEEK_EXPERTS),
    Case("zb-h1", pp=2, dp=2, extra=f"{SPREAD} {EXCHANGE}", model=DEEPSEEK_EXPERTS),
    Case("adaptive", pp=2, chunks=2, extra=V, model=GEMMA),
    Case("zb-h1", tp=2, pp=2, extra=SEQUENCE, model=GEMMA),
    Case("adaptive", pp=2, extra=f"{RECOMPUTE} --partition 5-3", model=GEMMA),
    Case("adaptive", pp=2, extra="--pack-to 100", model=GEMMA_LENGTHS),
    Case("adaptive", pp=2, chunks=2, extra=V, model=UNLIKE),
    Case("adaptive", tp=2, model=UNLIKE),
    Case("1f1b", cp=2, model=MODERN),
    Case("interleaved", cp=2, pp=2, chunks=2, model=MODERN),
    Case("adaptive", tp=2, cp=2, model=MODERN, extra=SEQUENCE),
    Case("adaptive", pp=2, chunks=2, extra="--decoder-first-pipeline-num-layers 2 " + LOOP),
)
# These cases compare fused attention kernels, as used on GPUs, with explicitly computed scores.
KERNEL = "--attention-backend fused"
BY_KERNELS = (
    Case("adaptive", pp=2, chunks=2, model=MODERN, extra=f"{V} {KERNEL}"),
    Case("adaptive", pp=2, model=MODERN, extra=f"{RECOMPUTE} --partition 5-3 {KERNEL}"),
    Case("adaptive", pp=2, model=WINDOWS, extra=f"--recompute-granularity selective {KERNEL}"),
    Case("1f1b", cp=2, model=MODERN, extra=KERNEL),
    Case("adaptive", pp=2, model=MODERN_LENGTHS, extra=f"--pack-to 100 {KERNEL}"),
    Case("adaptive", pp=2, model=DEEPSEEK, extra=KERNEL),
    Case("zb-h1", tp=2, pp=2, model=MODERN, extra=f"{SEQUENCE} {KERNEL}"),
    Case("adaptive", tp=2, cp=2, model=MODERN, extra=f"{SEQUENCE} {KERNEL}"),
)
SLICES, TOKENS = "--sequence-slices", "--slice-tokens"
# SLICED splits sequences into slices, with each schedule that supports slices.
SLICED = (
    Case("adaptive", model=LONG, extra=f"{SLICES} 4"),
    Case("adaptive", model=WINDOWS_LONG, extra=f"{SLICES} 3 --split-backward True"),
    Case("adaptive", tp=2, model=MODERN_LONG, extra=f"{SLICES} 3 {SEQUENCE} {RECOMPUTE}"),
    Case("adaptive", pp=2, model=LONG, extra=f"{SLICES} 3 --transport tcp"),
    Case("adaptive", pp=2, model=WINDOWS_LONG, extra=f"{SLICES} 4 {WHOLE}"),
    Case("adaptive", pp=2, chunks=2, model=MODERN_LONG, extra=f"{SLICES} 4 {V}"),
    Case("adaptive", pp=2, chunks=2, model=GEMMA_LONG, extra=f"{SLICES} 4 {LOOP}"),
    Case("dfc", pp=2, model=MODERN_LONG, extra=f"{SLICES} 4 {KERNEL} --activation-cap 1"),
    Case("seq-1f1b", pp=2, model=GEMMA_LONG, extra=f"{SLICES} 4 {RECOMPUTE}"),
    Case("adaptive", dp=2, model=LONG, extra=f"{SLICES} 2 --overlap-grad-reduce"),
    Case("adaptive", dp=2, model=LONG, extra=f"{SLICES} 2 --balance-replicas speed"),
    Case("adaptive", pp=2, dp=2, model=LONG, extra=f"{SLICES} 4 --overlap-grad-reduce"),
    Case("adaptive", tp=2, pp=2, chunks=2, model=WINDOWS_LONG, extra=f"{SLICES} 4 {V} {SEQUENCE}"),
    Case("adaptive", pp=4, chunks=2, model=MODERN_LONG, extra=f"{SLICES} 4 {V} --activation-cap 1"),
    Case("adaptive", pp=2, model=MODERN_LENGTHS, extra=f"{SLICES} 3 {PACK} --transport tcp"),
    Case("adaptive", pp=2, chunks=2, model=MODERN_LENGTHS, extra=f"{TOKENS} 24 {V}"),
    Case("adaptive", tp=2, model=MODERN_LENGTHS, extra=f"{TOKENS} 32 {SEQUENCE} {RECOMPUTE}"),
    Case("adaptive", dp=2, model=LENGTHS, extra=f"{TOKENS} 24 --overlap-grad-reduce"),
    Case("adaptive", pp=2, model=LATENT_LONG, extra=f"{SLICES} 3 {EXCHANGE}"),
    Case("adaptive", dp=2, model=LATENT_LONG, extra=f"{TOKENS} 16 {SPREAD} {EXCHANGE}"),
    Case("seq-1f1b", pp=2, model=GEMMA_LENGTHS, extra=f"{TOKENS} 16"),
    Case("adaptive", pp=2, dp=2, model=LENGTHS, extra=f"{SLICES} 2 --micro-batch-size 2"),
    # These cases determine the order of actions before the step, or have experts, which count the
    # documents of a row separately.
    Case("hinted", pp=2, chunks=2, model=MODERN_LENGTHS, extra=f"{TOKENS} 24 {V}"),
    Case("hinted", pp=2, model=MODERN_LENGTHS, extra=f"{SLICES} 3 {PACK}"),
    Case("hinted", pp=2, model=EXPERT_LENGTHS, extra=f"{TOKENS} 24"),
    Case("adaptive", pp=2, model=EXPERT_LENGTHS, extra=f"{SLICES} 3 {PACK} {WHOLE}"),
    Case("adaptive", dp=2, model=EXPERT_LENGTHS, extra=f"{TOKENS} 16 {SPREAD}"),
)
STATE = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
WITH_EXPERTS = tuple(
    Case(*positional, **shape, model=model)  # type: ignore[arg-type]
    for model, positional, shape in (
        # These cases combine different dispatchers, parallel sizes and placements, with split or
        # unsplit backward passes.
        (EXPERTS, ("adaptive",), {"pp": 2, "extra": f"{GATHER} {WHOLE}"}),
        (EXPERTS, ("adaptive",), {"dp": 2, "extra": f"{SPREAD} {EXCHANGE}"}),
        (MODERN_EXPERTS, ("adaptive",), {"pp": 2, "chunks": 2, "extra": f"{V} {EXCHANGE}"}),
        (MODERN_EXPERTS, ("adaptive",), {"tp": 2, "extra": f"{SEQUENCE} {EXCHANGE}"}),
        (FULL_EXPERTS, ("zb-h1",), {"pp": 2, "extra": EXCHANGE}),
        (
            DEEP_EXPERTS,
            ("adaptive",),
            {"pp": 2, "chunks": 2, "dp": 2, "extra": f"{SPREAD} {EXCHANGE}"},
        ),
        (EXPERTS, ("1f1b",), {"pp": 2, "dp": 2, "extra": f"{SPREAD} {GATHER} {STATE}"}),
        (EXPERTS, ("megatron",), {"pp": 2, "dp": 2, "extra": f"{SPREAD} {EXCHANGE}"}),
        (EXPERTS, ("zb-v",), {"pp": 2, "chunks": 2, "dp": 2, "extra": f"{SPREAD} {GATHER}"}),
        (EXPERTS, ("adaptive",), {"pp": 2, "chunks": 2, "dp": 2, "extra": f"{SPREAD} {EXCHANGE}"}),
        (
            MODERN_EXPERTS,
            ("interleaved",),
            {"pp": 2, "chunks": 2, "dp": 2, "extra": f"{SPREAD} {EXCHANGE}"},
        ),
        (
            MODERN_EXPERTS,
            ("zb-h1",),
            {"tp": 2, "pp": 2, "extra": f"{SEQUENCE} {SPREAD} {EACH} {EXCHANGE}"},
        ),
        (MODERN_EXPERTS, ("adaptive",), {"tp": 2, "pp": 2, "extra": f"{SEQUENCE} {GATHER}"}),
        (
            MODERN_EXPERTS,
            ("adaptive",),
            {"tp": 2, "pp": 2, "extra": f"{SEQUENCE} {SPREAD} {EACH} {EXCHANGE} {OVERLAP}"},
        ),
        (
            MODERN_EXPERTS,
            ("megatron",),
            {"tp": 2, "dp": 2, "extra": f"{SEQUENCE} {SPREAD} {GATHER}"},
        ),
        (
            MODERN_EXPERTS,
            ("1f1b",),
            {"dp": 4, "extra": f"--expert-model-parallel-size 4 {EXCHANGE} {RECOMPUTE}"},
        ),
    )
)
# All schedules, with split and unsplit backward passes, must give the same sums as megatron-core's
# schedule.
SAME_SUMS = (
    *(
        same(
            Case("megatron", pp=2, dp=2, model=model, extra=f"{SPREAD} {EXCHANGE}"),
            {"schedule": "1f1b"},
            {"schedule": "zb-h1"},
            {"schedule": "adaptive"},
            {"schedule": "adaptive", "extra": f"{SPREAD} {EXCHANGE} {OVERLAP}"},
        )
        for model in (EXPERTS, MODERN_EXPERTS)
    ),
    # A norm is summed over the layers of a rank first, so norms are only equal if ranks have the
    # same layers.
    same(
        Case("interleaved", pp=2, chunks=2, dp=2, model=EXPERTS, extra=f"{SPREAD} {EXCHANGE}"),
        {"schedule": "combined-1f1b", "extra": f"{SPREAD} {EXCHANGE} {OVERLAP}"},
    ),
    same(
        Case("zb-v", pp=2, chunks=2, dp=2, model=MODERN_EXPERTS, extra=f"{SPREAD} {EXCHANGE}"),
        {"schedule": "dualpipe-v", "extra": f"{SPREAD} {EXCHANGE} {OVERLAP}"},
        {"schedule": "adaptive", "extra": f"{SPREAD} {EXCHANGE} {OVERLAP}"},
    ),
)
# This run first divides the experts between two ranks. It then has all experts of a stage on one
# rank, and finally divides the experts again.
SPREAD_ANEW = (
    Case(
        *("adaptive", 1, 1, 1, 2, f"{SPREAD} --use-distributed-optimizer"),
        model=MODERN_EXPERTS,
        until=1,
    ),
)
SPREAD_ANEW += (
    dataclasses.replace(
        SPREAD_ANEW[0],
        pp=2,
        chunks=2,
        dp=1,
        extra="--use-distributed-optimizer",
        until=2,
        after=SPREAD_ANEW[0],
    ),
)
SPREAD_ANEW += (dataclasses.replace(SPREAD_ANEW[0], until=STEPS, after=SPREAD_ANEW[1]),)
# This run starts with a V placement, resumes with one stage per rank and a different partition, and
# then resumes with the V placement.
_BEGUN = Case("adaptive", pp=2, chunks=2, extra=V, model=TIED_MTP, until=1)
_MOVED = Case("1f1b", pp=2, model=TIED_MTP, extra=f"{LAYOUT} Et*5|ttt,mL", until=2, after=_BEGUN)
RESUMED = (
    *(dataclasses.replace(_BEGUN, until=STEPS), _BEGUN, _MOVED),
    dataclasses.replace(_BEGUN, until=STEPS, after=_MOVED),
)
# This run starts with four slices, resumes with three slices, and then with whole microbatches.
_FOUR = Case("adaptive", pp=2, model=LONG, extra=f"{SLICES} 4", until=1)
_THREE = dataclasses.replace(_FOUR, extra=f"{SLICES} 3", until=2, after=_FOUR)
SLICED_ANEW = (
    dataclasses.replace(_FOUR, extra="", until=STEPS),
    *(_FOUR, _THREE),
    dataclasses.replace(_FOUR, extra="", until=STEPS, after=_THREE),
)
HALF = (
    Case("adaptive", pp=2, chunks=2, extra=f"{V} --bf16"),
    Case("adaptive", pp=2, chunks=2, extra=f"{V} --fp16 --initial-loss-scale 1024"),
    Case("adaptive", pp=2, chunks=2, dp=2, extra=f"{V} --bf16 --use-distributed-optimizer"),
    Case("adaptive", pp=2, chunks=2, extra="--bf16"),
    Case("adaptive", tp=2, pp=2, extra="--bf16"),
    Case("1f1b", pp=2, dp=2, extra="--bf16 --use-distributed-optimizer"),
    Case("zb-h1", pp=2, model=MODERN_EXPERTS, extra=f"--bf16 {GROUPED} {EXCHANGE}"),
    Case(
        *("1f1b", 1, 2, 1, 2, f"--bf16 {GROUPED} {SPREAD} {GATHER} {STATE}"), model=MODERN_EXPERTS
    ),
)
# The jobs in each group must have bitwise equal losses and norms, because their parallel sizes are
# equal.
DROPPING = Case("adaptive", model=DROPOUT)
SAME_LOSSES = (
    same(
        dataclasses.replace(DROPPING, pp=2, chunks=2, extra=LOOP),
        {"run": 2},
        {"extra": f"{LOOP} --activation-cap 1"},
        {"schedule": "interleaved"},
        {"schedule": "megatron"},
    ),
    same(dataclasses.replace(DROPPING, pp=4), {"run": 2}, {"schedule": "1f1b"}),
    same(dataclasses.replace(DROPPING, pp=2, extra=f"{SLICES} 2"), {"run": 2}),
    same(dataclasses.replace(DROPPING, tp=2, pp=2), {"run": 2}, {"schedule": "1f1b"}),
    same(dataclasses.replace(DROPPING, pp=2, dp=2), {"run": 2}, {"schedule": "1f1b"}),
)


# Gradients are not clipped, because clipping uses the norm, which is rounded differently if layers
# are on other ranks.
UNCLIPPED = "--clip-grad 0"


def every_cut() -> Iterator[tuple[Case, Case]]:
    """Yields pairs of jobs with dropout. The layers of the first job are not divided into stages.

    Embeddings are untied, because the gradients of a single embedding matrix are summed in a
    different order than the gradients of two copies.
    """
    flags = f"{UNCLIPPED} --untie-embeddings-and-output-weights"
    whole = dataclasses.replace(DROPPING, schedule="megatron", extra=flags)
    for case in (
        dataclasses.replace(DROPPING, extra=f"{RECOMPUTED} uniform --recompute-num-layers 2"),
        dataclasses.replace(DROPPING, pp=2),
        dataclasses.replace(
            DROPPING, pp=2, extra=f"{RECOMPUTED} block --recompute-num-layers 1 --partition 3-5"
        ),
        dataclasses.replace(DROPPING, pp=2, chunks=2, extra=V),
        dataclasses.replace(DROPPING, pp=2, chunks=2, extra=f"{LOOP} --partition 0-5-3-0"),
        dataclasses.replace(whole, pp=2, chunks=2, extra=""),
        dataclasses.replace(DROPPING, pp=4),
        dataclasses.replace(DROPPING, pp=4, schedule="zb-h1", extra="--partition 0-5-3-0"),
        dataclasses.replace(
            DROPPING, pp=4, chunks=2, extra=f"{V} --recompute-granularity selective"
        ),
    ):
        yield whole, dataclasses.replace(case, extra=f"{flags} {case.extra}".strip())
    for shape in ({"dp": 2}, {"tp": 2}):
        case = dataclasses.replace(whole, **shape)
        yield case, dataclasses.replace(case, schedule="adaptive", pp=2)


def every_placement() -> tuple[Case, ...]:
    """Returns jobs with dropout that have a loop placement or a V placement of the stages.

    The first job has a loop placement, and the next two have the same V placement. The other three
    jobs are parts of a run that changes its placement.

    This run has a V placement, then a loop placement with a different partition, and then the V
    placement again.
    """
    vee = dataclasses.replace(DROPPING, pp=2, chunks=2, extra=f"{V} {UNCLIPPED}", until=STEPS)
    loop = dataclasses.replace(vee, extra=f"{LOOP} {UNCLIPPED}")
    begun = dataclasses.replace(vee, until=1)
    moved = dataclasses.replace(
        loop, extra=f"{loop.extra} --partition 3-1-0-4", until=2, after=begun
    )
    back = dataclasses.replace(vee, after=moved)
    return loop, vee, dataclasses.replace(vee, run=2), begun, moved, back


# COMPARED contains every job whose values must equal those of a single process, up to rounding.
COMPARED = (
    *(*ORDERS, *TRANSPORTED, *SHAPES, *OPTIONS, *PLACED, *DEALT),
    *(*DIFFERENT_LENGTHS, *TODAY, *WITH_EXPERTS, *FREE, *BY_KERNELS, *SLICED),
)


def with_other_sums(case: Case) -> tuple[Case, ...]:
    """Returns copies of ``case``, one for each alternative order of summation."""
    return tuple(dataclasses.replace(case, variant=variant) for variant in OTHER_SUMS)
