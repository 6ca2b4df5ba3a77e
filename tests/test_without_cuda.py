"""Tests the substitutes for CUDA functions, and tests that other code is not affected.

Each substitute has a canary: a function that runs the part of megatron-core that needs this
substitute. A canary must succeed if all substitutes are installed, and must fail if only its
substitute is missing. So canaries detect changes in new releases of torch or megatron-core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive import accelerator

ROOT = Path(__file__).resolve().parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA needs no substitute")

# This script runs each experiment in a separate process, because an experiment must import
# megatron-core either before or after the substitutes are installed. Importing torch takes seconds,
# so the processes are forked from one that has already imported torch.
EXPERIMENTS = """
import datetime, faulthandler, importlib, json, os, sys, tempfile, traceback, warnings
warnings.simplefilter("ignore")
import torch
from megatron.adaptive import accelerator, without_cuda

def current_device():
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    return str(ChainedOptimizer([]).get_loss_scale().device)

def synchronize():
    import torch.distributed as dist
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    channel = P2PCommunicator(dist.group.WORLD, config)
    try:
        return channel._communicate_shapes(None, None, False, False) is not None
    finally:
        dist.destroy_process_group()

def streams():
    from megatron.core.pipeline_parallel import utils
    utils._COMP_STREAM = utils._COMM_STREAM = None
    utils.set_streams()
    with torch.cuda.stream(utils.get_comm_stream()):
        utils.get_comm_stream().wait_stream(utils.get_comp_stream())
    utils.get_comm_stream().record_event().synchronize()
    return True

def factories():
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler
    return str(ConstantGradScaler(8.0).scale.device)

def tensor_moves():
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, 10, 2)
    state = scaler.state_dict()
    state["scale"] = torch.tensor([4.0])
    scaler.load_state_dict(state)
    return [float(scaler.scale), str(torch.nn.Linear(1, 1).cuda().weight.device)]

def tensor_type():
    from megatron.core.optimizer import OptimizerConfig, optimizer as loaded
    # Reload the module, because constants in its code were set when it was loaded.
    Float16OptimizerWithFloat16Params = importlib.reload(loaded).Float16OptimizerWithFloat16Params
    half, full = (torch.nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.bfloat16, torch.float))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([half, full], lr=0.1), OptimizerConfig(bf16=True), None, lambda *_: None
    )
    kinds = optimizer.float16_groups, optimizer.fp32_from_fp32_groups
    return [[len(group) for group in kind] for kind in kinds]

def random_state():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 5)
    drawn = []
    for _ in range(2):
        with tracker.fork("mine"):
            drawn.append(float(torch.rand(())))
    drawn.append(float(torch.rand(())))
    expected = []
    for seed, count in ((5, 2), (1, 1)):
        generator = torch.Generator().manual_seed(seed)
        expected += [float(torch.rand((), generator=generator)) for _ in range(count)]
    return drawn == expected

def compiler():
    def fused(): pass
    fused.__module__ = "megatron.core.fusions.fused_softmax"
    torch.compile(fused)
    torch.compile(dynamic=True)(fused)
    if "torch._dynamo" in sys.modules:
        raise RuntimeError("the compiler is loaded")

def grouped_products():
    from megatron.core.transformer.moe import grouped_gemm_util
    grouped = importlib.reload(grouped_gemm_util)
    grouped.assert_grouped_gemm_is_available()
    matrices = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    return grouped.ops.gmm(torch.ones(3, 2), matrices, torch.tensor([1, 2])).tolist()

def between_two(function):
    import torch.distributed as dist
    name = os.path.join(tempfile.mkdtemp(), "store")
    child = os.fork()
    try:
        limit = datetime.timedelta(seconds=60)
        rank, store = int(child == 0), dist.FileStore(name, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        return function(dist.group.WORLD)
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if dist.is_initialized():  # otherwise a second error would hide the first
            dist.destroy_process_group()

def exchanged_parts():
    from megatron.core.tensor_parallel.mappings import all_to_all
    def exchange(group):
        # The first rank sends 1 and 2 rows, and the second rank 2 and 1 rows.
        sizes = torch.tensor([1, 2] if group.rank() == 0 else [2, 1])
        given = torch.full((3,), float(group.rank()))
        return all_to_all(group, given, sizes, sizes).tolist()
    return between_two(exchange)

def unequal_parts():
    from megatron.core.tensor_parallel import mappings
    def there_and_back(group):
        own = torch.full((group.rank() + 1, 1), float(group.rank() + 1), requires_grad=True)
        whole = mappings.gather_from_sequence_parallel_region(
            own, group=group, output_split_sizes=[1, 2]
        )
        whole.sum().backward()
        return whole.flatten().tolist() + own.grad.flatten().tolist()
    return between_two(there_and_back)

# The compiler's canary runs first, because optimizers also load the compiler.
CANARIES = [
    compiler, current_device, synchronize, streams, factories, tensor_moves, tensor_type,
    random_state, grouped_products, exchanged_parts, unequal_parts,
]

CLASSES = torch.Tensor, torch.nn.Module
undo = {}

def state(finder):
    # Returns the values that substitutions may change, each group with a function that sets a
    # value, or removes it if the value is None.
    def in_dict(names):
        return lambda name, value: names.pop(name) if value is None else names.update({name: value})

    def in_class(kind):
        def change(name, value):
            delattr(kind, name) if value is None else setattr(kind, name, value)
        return change

    dicts = [*finder._substitutes.values(), finder.constants, finder._modules]
    return [(dict(names), in_dict(names)) for names in dicts] + [
        (dict(vars(kind)), in_class(kind)) for kind in CLASSES
    ]

def remember(name):
    substitute = getattr(without_cuda, name)

    def run(finder):
        before = state(finder)
        substitute(finder)
        undo[name] = [
            (change, attribute, old.get(attribute), value)
            for (old, change), (new, _) in zip(before, state(finder))
            for attribute, value in new.items()
            if old.get(attribute) is not value
        ]

    setattr(without_cuda, name, run)

def answer_of(function):
    try:
        return {"value": function()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

def late():
    import megatron.core.tensor_parallel
    print(json.dumps(["late", answer_of(accelerator.install)]), flush=True)

def finders():
    return sum(isinstance(finder, without_cuda.Finder) for finder in sys.meta_path)

def contents():
    # Returns all attributes of torch's modules and of these classes.
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
    return {
        f"{getattr(owner, '__name__', owner)}.{name}": value
        for owner in [*modules, *CLASSES]
        for name, value in list(vars(owner).items())
    }

def canaries():
    before, environment = contents(), dict(os.environ)
    names = [name for name in vars(without_cuda) if name.startswith("_substitute_")]
    for name in names:
        remember(name)
    first = accelerator.install(), finders()
    accelerator.install_for_trainer()
    after = contents()
    answers = {"changed": sorted(name for name in after if after[name] is not before.get(name))}
    unwanted = "grouped_gemm", "torch._dynamo"
    answers["added modules"] = [name for name in unwanted if name in sys.modules]
    answers["environment"] = dict(os.environ) == environment
    import megatron.core.tensor_parallel
    import megatron.core.models.gpt
    again = accelerator.install(), finders()
    answers.update(twice=[first[0], first == again], names=sorted(names))
    answers["compiler"] = [name in sys.modules for name in ("torch._dynamo", "torch._inductor")]
    held = {id(value) for value in before.values()}
    answers["shared"] = [
        name
        for changes in undo.values()
        for _, name, _, value in changes
        if not isinstance(value, str) and id(value) in held
    ]
    answers["others"] = [
        answer_of(lambda: str(torch.zeros(1, device="cuda:1").device)),
        answer_of(lambda: str(torch.zeros(1).cuda().device)),
        answer_of(lambda: str(torch.nn.Linear(1, 1).cuda().weight.device)),
        torch.zeros(1).type(),
        torch.cuda.device_count(),
    ]
    with torch.device("meta"):
        answers["others"].append(str(torch.zeros(1).device))
    from megatron.core import parallel_state
    without_cuda.include_program({})
    without_cuda.include_program(globals())
    answers["no user of it"] = torch is sys.modules["torch"]
    globals()["parallel_state"] = parallel_state
    without_cuda.renew_program()
    answers["given"] = [
        str(torch.zeros(1, device="cuda:1").device),
        str(torch.ones(1, device=torch.device("cuda", 0)).device),
        str(torch.empty(1, device="meta").device),
        str(torch.zeros(1).cuda().device),
        torch.cuda.device_count(),
        str(torch.cuda.current_device()),
        str(accelerator.current_device()),
    ]
    with torch.device("meta"):
        answers["given"].append(str(torch.zeros(1).device))
    for canary in CANARIES:
        answers[canary.__name__ + " with"] = answer_of(canary)
        changes = undo["_substitute_" + canary.__name__]
        for change, attribute, old, new in changes:
            change(attribute, old)
        answers[canary.__name__ + " without"] = answer_of(canary)
        for change, attribute, old, new in changes:
            change(attribute, new)
    for item in answers.items():
        print(json.dumps(item), flush=True)

names = {}
for function in (late, canaries):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    names[child] = function.__name__
failed = 0
for _ in range(2):
    child, status = os.wait()
    if code := os.waitstatus_to_exitcode(status):
        print(f"{names[child]} exited with status {code}", file=sys.stderr)
        failed = 1
sys.exit(failed)
"""
LIMIT_S = 200
"""Timeout of an experiment in seconds. After this time, it prints its stack traces and exits."""
# The error for missing CUDA depends on whether torch was built with CUDA.
NO_CUDA = (
    "Found no NVIDIA driver"
    if torch.backends.cuda.is_built()
    else "Torch not compiled with CUDA enabled"
)
# Canaries are calls that fail without CUDA unless they are substituted. Each value has the expected
# result of a canary, and a part of the error that it raises without its substitute.
CANARIES: dict[str, tuple[Any, str]] = {
    "current_device": ("cpu", NO_CUDA),
    "synchronize": (True, NO_CUDA),
    "streams": (True, f"{NO_CUDA} or invalid argument to exchangeDevice"),
    "factories": ("cpu", NO_CUDA),
    "tensor_moves": ([4.0, "cpu"], "must be cuda device"),
    "tensor_type": ([[1], [1]], "Received torch.BFloat16Tensor"),
    "random_state": (True, NO_CUDA),
    "compiler": (None, "the compiler is loaded"),
    "grouped_products": ([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]], "Grouped GEMM is not available"),
    "exchanged_parts": ([0.0, 1.0, 1.0], "incompatible function arguments"),
    "unequal_parts": ([1.0, 2.0, 2.0, 2.0], "invalid tensor size"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Returns the result of each experiment, either ``{"value": ...}`` or ``{"error": text}``."""
    done = experiments(LIMIT_S)
    assert done.returncode == 0, failure_of(done)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def experiments(limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs all experiments. Each prints its stack traces and exits after ``limit_s`` seconds."""
    return subprocess.run(
        [sys.executable, "-c", f"LIMIT_S = {limit_s}\n{EXPERIMENTS}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s + 40,
    )


def failure_of(done: subprocess.CompletedProcess[str]) -> str:
    """Describes the failed process ``done`` by its status, its last answer, and its errors."""
    answer = (done.stdout.splitlines() or ["none"])[-1][:500]
    return f"status {done.returncode}; last answer: {answer}; errors:\n{done.stderr}"


def test_experiments_that_fail_say_why() -> None:
    """Checks that failed experiments are explained, and that a killed one has a nonzero status."""
    text = failure_of(experiments(0.2))
    assert "status 1" in text
    assert "Timeout (0:00:00.200000)!" in text
    assert "canaries exited with status 1" in text


@pytest.mark.long
@without_gpu
@pytest.mark.parametrize("name", CANARIES)
def test_canary_dies_without_its_substitution_alone(name: str, answers: dict[str, Any]) -> None:
    answered = answers[f"{name} with"]
    if "cannot import name 'grouped_gemm_util'" in answered.get("error", ""):
        pytest.skip("megatron-core 0.17 and newer have no grouped_gemm_util module")
    assert answered == {"value": CANARIES[name][0]}
    answer = answers[f"{name} without"]
    expected = CANARIES[name][1].split(" or ")
    assert any(phrase in answer.get("error", "it lives") for phrase in expected), answer


@without_gpu
def test_install_after_megatron_core_is_refused(answers: dict[str, Any]) -> None:
    error = answers["late"]["error"]
    assert error.startswith("SetupError: megatron.core was imported before")
    assert "call install() first" in error
    assert len(error.splitlines()) == 1


@without_gpu
def test_substitutions_are_made_once(answers: dict[str, Any]) -> None:
    assert answers["names"] == sorted(f"_substitute_{name}" for name in CANARIES)
    assert answers["twice"] == [True, True]
    assert answers["compiler"] == [False, False]  # megatron-core must not load the CUDA compiler.


@without_gpu
def test_a_program_of_megatron_lm_gets_them_and_others_do_not(answers: dict[str, Any]) -> None:
    """Checks that only programs of Megatron-LM get substitutes for functions that need CUDA."""
    assert answers["given"] == ["cpu", "cpu", "meta", "cpu", 1, "cpu", "cpu", "meta"]
    for answer in answers["others"][:3]:
        assert NO_CUDA in answer["error"]
    assert answers["no user of it"]
    assert answers["others"][3:] == ["torch.FloatTensor", 0, "meta"]


@without_gpu
def test_torch_stays_what_it_is(answers: dict[str, Any]) -> None:
    # Only these two methods of torch are replaced. Their substitutes check which module calls them.
    assert answers["changed"] == ["Module.cuda", "Tensor.cuda"]
    assert answers["added modules"] == []
    assert answers["environment"]


@without_gpu
def test_no_substitute_is_an_object_that_torch_has_already(answers: dict[str, Any]) -> None:
    """Checks that each substitute is a new object, not an existing object of torch.

    The compiler of torch 2.11 identifies functions by object identity. It rejects a substitute that
    is an object it already knows ("Duplicate torch object").
    """
    assert answers["shared"] == []


@needs_gpu
@pytest.mark.gpu
def test_with_cuda_nothing_is_substituted() -> None:
    assert not accelerator.install()
    assert torch.zeros(1, device="cuda").is_cuda


# These files contain only the code that Megatron-LM runs at its start. Up to version 0.16, this
# code runs the CUDA compiler.
TRAINER = {
    "core/__init__.py": "",
    "training/__init__.py": "",
    "training/initialize.py": """
import torch

def initialize_megatron(extra_args_provider=None, allow_no_cuda=False):
    if not allow_no_cuda:
        assert torch.cuda.is_available(), "Megatron requires CUDA."
    return torch.cuda.device_count()
""",
    "legacy/__init__.py": "",
    "legacy/fused_kernels/__init__.py": """
CUDA_HOME = None

def load(args):
    raise TypeError(CUDA_HOME + "/bin/nvcc")
""",
}
STARTS = """
import sys, torch
from megatron.adaptive import without_cuda
without_cuda.install()
from megatron.legacy import fused_kernels
from megatron.training.initialize import initialize_megatron
fused_kernels.load(None)
counts = [
    initialize_megatron(extra_args_provider=print),
    initialize_megatron(print, False),
    initialize_megatron(allow_no_cuda=False),
]
print(*counts, initialize_megatron.__name__, torch.cuda.device_count())
"""


@without_gpu
def test_megatron_lms_own_trainer_starts_without_cuda(tmp_path: Path) -> None:
    """Checks that ``pretrain_gpt.py`` of Megatron-LM starts without CUDA.

    The program must not exit with "Megatron requires CUDA.". Megatron-LM 0.16 must not fail because
    the path of the CUDA folder is None.
    """
    for name, text in TRAINER.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # Megatron-LM's code must see one device, and all other code must see none. The function
    # initialize_megatron must accept allow_no_cuda as a positional argument.
    assert done.stdout == "1 1 1 initialize_megatron 0\n", done.stderr
