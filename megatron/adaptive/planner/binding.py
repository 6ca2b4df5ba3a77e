"""Names what holds a plan back most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.adaptive.planner.plan import Limit, StagePrediction

__all__ = ["binding"]

_NAMES = {
    "compute": "compute of stage {stage}",
    "tp": "communication between the tensor-parallel ranks of stage {stage}",
    "transfer": "transfers between stages",
    "reduction": "gradient reduction of stage {stage}",
    "embedding": "gradients of the tied embeddings",
    "optimizer": "the optimizer step of stage {stage}",
    "bubble": "idle time of the pipeline",
    "jitter": "actions that take longer by chance",
    "beside": "what a step does beside pipeline, reduction and optimizer",
}


def binding(parts: Mapping[str, float], stages: Sequence[StagePrediction]) -> Limit:
    """Name what holds a plan back: a stage that does not fit, else the largest part.

    Args:
        parts: seconds of the step by cause.
        stages: what is predicted of each pipeline rank.
    """
    short = [i for i, stage in enumerate(stages) if stage.memory.missing_bytes]
    if short:
        stage = max(short, key=lambda i: stages[i].memory.missing_bytes)
        gone = stages[stage].memory
        text = (
            f"stage {stage} needs {gone.total_bytes / 1e9:.2f} GB of"
            f" {gone.limit_bytes / 1e9:.2f} GB per GPU: {gone.missing_bytes / 1e9:.2f} GB too many"
        )
        return Limit(what="memory", stage=stage, text=text)
    name = max(parts, key=lambda key: parts[key])
    slowest = max(range(len(stages)), key=lambda i: stages[i].forward_s + stages[i].backward_s)
    whole = sum(parts.values())
    share = 100 * parts[name] / whole if whole else 0.0
    text = f"{_NAMES[name].format(stage=slowest)}: {share:.0f}% of the step"
    return Limit(what=name, stage=slowest, text=text)
