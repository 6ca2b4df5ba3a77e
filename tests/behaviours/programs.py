"""Runs small random programs that use torch, transformers, peft and accelerate.

Usage: ``programs.py PREPARATION RESULTS SEED...``. Runs one program per seed, and writes a JSON
list of its observations (values, devices, dtypes and errors) to ``RESULTS``. If ``PREPARATION`` is
``early`` or ``late``, ``megatron.adaptive`` is imported and installed before or after the other
libraries. If it is ``plain``, the package is not imported. The preparation must not change the
observations of a seed.

A program consists of at most five statements. A statement is a function that takes a
:class:`random.Random` and yields observations. Each of the smallest seeds runs a single statement.
Larger seeds select random statements.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Statement = Callable[[random.Random], Iterator[Any]]


def install() -> None:
    """Installs and uninstalls this project, and imports modules that could affect other code."""
    import megatron.adaptive
    from megatron.adaptive import accelerator

    megatron.adaptive.install()
    megatron.adaptive.uninstall()
    accelerator.install_for_trainer()
    assert megatron.adaptive.Pipeline
    for name in (
        "training.pretrain",
        "training.loop",
        "training.profile_run",
        "gpt.setup",
        "modules.profiler",
        "checkpoint.trainer_checkpoints",
        "rebalance.repartition",
        "cli.pretrain",
        "data.datasets",
        "cli.checkpoint",
        "cluster.node_processes",
        "profiling.transport_check",
    ):
        importlib.import_module(f"megatron.adaptive.{name}")


def import_others() -> None:
    """Imports the libraries that the programs use."""
    for name in ("torch", "numpy", "transformers", "accelerate", "peft"):
        importlib.import_module(name)


PREPARATION = sys.argv[1] if __name__ == "__main__" else "plain"
if PREPARATION == "early":
    install()
import_others()
if PREPARATION == "late":
    install()

import accelerate  # noqa: E402
import numpy as np  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

DEVICES = (None, "cpu", "meta", "cuda", "cuda:1", torch.device("cpu"), torch.device("cuda", 0))
DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.int64)
FLOATS = (None, torch.float32, torch.float64, torch.bfloat16)
SHAPED = ("empty", "ones", "zeros", "rand", "randn")
LIKE = ("empty_like", "ones_like", "zeros_like", "rand_like", "randn_like")


def seen(value: Any) -> Any:
    """Converts ``value`` to data that can be stored as JSON and compared between processes."""
    if isinstance(value, torch.Tensor):
        facts = [str(value.device), str(value.dtype), list(value.shape), value.requires_grad]
        if value.device.type == "meta":
            return facts
        raw = value.detach().contiguous().view(torch.uint8) if value.dim() else value.detach()
        data = raw.numpy().tobytes() if value.dim() else repr(value.detach().item()).encode()
        return [*facts, hashlib.sha256(data).hexdigest()[:16]]
    if isinstance(value, nn.Module):
        named = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return {name: seen(tensor) for name, tensor in named.items()}
    if isinstance(value, dict):
        return {str(key): seen(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [seen(item) for item in value]
    if isinstance(value, bool | int | None):
        return value
    # Remove memory addresses, because they differ between processes.
    return re.sub(r"0x[0-9a-f]+", "0x", value if isinstance(value, str) else repr(value))


def tried(call: Callable[[], Any]) -> Any:
    """Returns the result of ``call()``, or type and message of the exception that it raises."""
    try:
        return seen(call())
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+|/tmp/\S+", "...", str(error)).splitlines()
        return [type(error).__name__, text[0][:200] if text else ""]


def shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))


def make(rng: random.Random, **fixed: Any) -> Any:
    """Returns a tensor from a random factory of torch. Uninitialized tensors are set to zero."""
    options = {**fixed}
    if "device" not in fixed and rng.random() < 0.4:
        options["device"] = rng.choice(DEVICES)
    name = rng.choice((*SHAPED, *LIKE, "full", "eye", "arange", "linspace", "randint", "randperm"))
    if name in ("rand", "randn", *LIKE) and rng.random() < 0.5:
        options["dtype"] = rng.choice(FLOATS)
    elif name in SHAPED or name == "full":
        options["dtype"] = rng.choice(DTYPES)
    size = shape(rng)
    arguments: tuple[Any, ...] = {
        "full": (size, 3),
        "eye": (rng.randint(1, 4),),
        "arange": (rng.randint(1, 9),),
        "linspace": (0, 1, rng.randint(1, 5)),
        "randint": (0, 9, size),
        "randperm": (rng.randint(1, 9),),
    }.get(name, (torch.ones(size),) if name in LIKE else (size,))
    tensor = getattr(torch, name)(*arguments, **options)
    return torch.zeros_like(tensor) if name.startswith("empty") else tensor


def factories(rng: random.Random) -> Iterator[Any]:
    for _ in range(rng.randint(2, 6)):
        yield tried(lambda: make(rng))
    yield tried(lambda: torch.tensor([1.0, 2.0], device=rng.choice(DEVICES)))
    yield tried(lambda: torch.as_tensor(np.arange(3), device=rng.choice(DEVICES)))
    yield tried(lambda: torch.zeros(2, pin_memory=True))
    yield tried(lambda: torch.empty_strided((2, 2), (1, 2), device=rng.choice(DEVICES)).shape)
    yield tried(lambda: make(rng, device="cpu", requires_grad=True))


def device_contexts(rng: random.Random) -> Iterator[Any]:
    for _ in range(2):
        with torch.device(rng.choice(("cpu", "meta"))):
            yield tried(lambda: make(rng))
            yield tried(lambda: nn.Linear(2, 3).weight)
            yield tried(lambda: torch.tensor([1, 2]))
            with torch.device(rng.choice(("cpu", "meta"))):
                yield tried(lambda: torch.arange(3.0))
            yield tried(lambda: torch.zeros(2, device="cpu"))
            yield tried(torch.get_default_device)
    with torch.device("cuda"):
        yield tried(lambda: torch.zeros(1))


def default_device(rng: random.Random) -> Iterator[Any]:
    try:
        torch.set_default_device(rng.choice(("meta", "cpu")))
        yield tried(torch.get_default_device)
        for _ in range(3):
            yield tried(lambda: make(rng))
        yield tried(lambda: nn.Embedding(3, 2).weight)
    finally:
        torch.set_default_device(None)
    yield tried(lambda: torch.ones(1))


def default_dtype(rng: random.Random) -> Iterator[Any]:
    try:
        torch.set_default_dtype(rng.choice((torch.float64, torch.bfloat16)))
        yield tried(lambda: make(rng))
        yield tried(lambda: nn.LayerNorm(4).weight)
    finally:
        torch.set_default_dtype(torch.float32)


def seeds(rng: random.Random) -> Iterator[Any]:
    yield torch.initial_seed()
    torch.manual_seed(rng.randint(0, 99))
    yield tried(lambda: torch.rand(3))
    state = torch.get_rng_state()
    yield tried(lambda: [torch.randn(2), torch.randperm(5), torch.randint(0, 9, (2,))])
    torch.set_rng_state(state)
    yield tried(lambda: torch.randn(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield tried(lambda: torch.rand(1))
    yield tried(lambda: torch.rand(1))
    generator = torch.Generator().manual_seed(rng.randint(0, 99))
    yield tried(lambda: torch.rand(2, generator=generator))
    yield tried(lambda: torch.empty(3).normal_(generator=generator))
    yield tried(
        lambda: [torch.bernoulli(torch.full((4,), 0.5)), torch.default_generator.initial_seed()]
    )
    yield [random.random(), float(np.random.rand())]


def seeds_of_cuda(rng: random.Random) -> Iterator[Any]:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for call in (
        lambda: torch.cuda.manual_seed(rng.randint(0, 9)),
        lambda: torch.cuda.manual_seed_all(5),
        torch.cuda.get_rng_state,
        lambda: torch.cuda.set_rng_state(before),
        torch.cuda.get_rng_state_all,
        lambda: torch.cuda.random.get_rng_state("cuda"),
        torch.cuda.initial_seed,
        lambda: len(torch.cuda.default_generators),
        lambda: torch.cuda.default_generators[0],
        lambda: torch.Generator("cuda"),
        lambda: torch.cuda._lazy_call(lambda: print("called at once")),
    ):
        yield tried(call)
        yield bool(torch.equal(before, torch.get_rng_state()))
    with torch.random.fork_rng():
        yield tried(lambda: torch.rand(2))
    yield tried(lambda: torch.rand(2))


def answers_of_cuda(rng: random.Random) -> Iterator[Any]:
    questions: list[Callable[[], Any]] = [
        torch.cuda.is_available,
        torch.cuda.device_count,
        torch.cuda.is_initialized,
        torch.cuda.current_device,
        lambda: torch.cuda.set_device(0),
        lambda: torch.cuda.get_device_properties(0),
        lambda: torch.cuda.get_device_name(0),
        torch.cuda.get_device_capability,
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        lambda: torch.cuda.memory_allocated(),
        lambda: torch.cuda.max_memory_allocated(),
        lambda: torch.cuda.mem_get_info(),
        torch.cuda.current_stream,
        torch.cuda.Stream,
        torch.cuda.Event,
        lambda: torch.cuda.stream(None).__enter__(),
        lambda: torch.cuda.stream(torch.cuda.Stream()).__enter__(),
        torch.cuda.is_bf16_supported,
        lambda: torch.cuda.device("cuda:0").__enter__(),
        lambda: torch.backends.cuda.is_built(),
        lambda: torch.accelerator.is_available(),
        lambda: torch.accelerator.current_accelerator(),
        lambda: torch.cuda.ipc_collect(),
        lambda: torch.cuda.nvtx.range_push("x"),
    ]
    rng.shuffle(questions)
    for question in questions:
        yield [getattr(question, "__name__", ""), tried(question)]


def moves(rng: random.Random) -> Iterator[Any]:
    tensor, layer = make(rng, device="cpu"), nn.Linear(2, 2)
    for call in (
        lambda: tensor.cuda(),
        lambda: tensor.cuda(0, non_blocking=True),
        lambda: torch.Tensor.cuda(tensor),
        lambda: list(map(torch.Tensor.cuda, [tensor])),
        lambda: tensor.to("cuda"),
        lambda: tensor.to("meta"),
        lambda: tensor.pin_memory(),
        lambda: layer.cuda(),
        lambda: nn.Sequential(layer).cuda(0),
        lambda: layer.to("cuda:0"),
        lambda: layer._apply(lambda weight: weight.cuda()),
        lambda: layer.to("meta").weight,
        lambda: nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight.shape,
        lambda: nn.utils.skip_init(nn.Linear, 2, 3).weight.shape,
        lambda: nn.Linear(2, 2).half().double().weight,
        lambda: torch.nn.Parameter(torch.ones(1)).cuda(),
        lambda: tensor.is_cuda,
    ):
        yield tried(call)


def types(rng: random.Random) -> Iterator[Any]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        tensor = torch.ones(2, dtype=dtype)
        yield tensor.type()
        yield tried(lambda tensor=tensor: tensor.type(torch.float64))
        yield tried(lambda tensor=tensor: tensor.type("torch.DoubleTensor"))
        yield tried(lambda tensor=tensor: tensor.type("torch.cuda.FloatTensor"))
    yield nn.Parameter(torch.ones(1)).type()
    yield tried(lambda: torch.set_default_tensor_type("torch.cuda.FloatTensor"))
    torch.set_default_tensor_type("torch.FloatTensor")
    yield tried(lambda: make(rng))


def compiled(rng: random.Random) -> Iterator[Any]:
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.op + str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    size = rng.randint(2, 5)

    def function(x: Any) -> Any:
        made = torch.zeros(size) + torch.arange(size) + torch.ones_like(x)
        return (x.type(torch.float64) * made).sin() + torch.full((size,), 2.0, dtype=torch.float64)

    run = torch.compile(function, backend=backend, fullgraph=rng.random() < 0.5)
    yield tried(lambda: run(torch.ones(size)))
    decorated = torch.compile(backend=backend)(lambda x: torch.empty(size).fill_(1) @ x)
    yield tried(lambda: decorated(torch.ones(size)))
    module = nn.Sequential(nn.Linear(size, 2), nn.Dropout(0.5))
    torch.manual_seed(1)
    yield tried(lambda: torch.compile(module, backend=backend)(torch.ones(size)))
    yield graphs
    yield [torch.compiler.is_compiling(), os.environ.get("TORCHDYNAMO_DISABLE")]


def transforms(rng: random.Random) -> Iterator[Any]:
    size = rng.randint(2, 4)

    def function(x: Any) -> Any:
        return (x * torch.ones(size) + torch.arange(size)).pow(2).sum()

    x = torch.linspace(0, 1, size)
    yield tried(lambda: torch.func.grad(function)(x))
    yield tried(lambda: torch.func.vmap(function)(torch.stack([x, x])))
    yield tried(lambda: torch.func.hessian(function)(x))
    yield tried(lambda: torch.fx.symbolic_trace(function).code)
    from torch.fx.experimental.proxy_tensor import make_fx

    yield tried(lambda: make_fx(function)(x).code)
    yield tried(lambda: torch.jit.trace(function, x).code)

    class Net(nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x + torch.zeros(2, 2).sum()

    yield tried(lambda: torch.jit.script(Net())(x))
    yield tried(lambda: str(torch.export.export(Net(), (x,)).graph))


class Names(TorchFunctionMode):
    """Records the names of all torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Records the names of all torch operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def modes(rng: random.Random) -> Iterator[Any]:
    for mode in (Names(), Operations()):
        with mode:
            yield tried(lambda: make(rng, device="cpu"))
            yield tried(lambda: nn.Linear(2, 2)(torch.ones(2)))
            tried(lambda: torch.ones(1).cuda())
            torch.ones(1).type()
        yield mode.names
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield tried(lambda: str(torch.zeros(2, device="cuda").device))
        yield tried(lambda: str(torch.ones(2).cuda().device))


def training(rng: random.Random) -> Iterator[Any]:
    torch.manual_seed(rng.randint(0, 99))
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = rng.choice(
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.01),
            lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            lambda p: torch.optim.Adagrad(p, lr=0.01),
        )
    )(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, shuffle=True, pin_memory=rng.random() < 0.5
    )
    for inputs, targets in loader:
        with torch.autocast("cpu", enabled=rng.random() < 0.5):
            loss = nn.functional.mse_loss(checkpoint(model, inputs, use_reentrant=False), targets)
        loss.backward()
        yield seen(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        yield seen(loss)
    yield seen(model)
    yield tried(lambda: torch.amp.GradScaler("cuda").is_enabled())
    yield tried(lambda: torch.autocast("cuda").__enter__())


def storing(rng: random.Random) -> Iterator[Any]:
    buffer = io.BytesIO()
    torch.save({"a": make(rng, device="cpu"), "b": [1]}, buffer)
    for where in (None, "cpu", "cuda", "meta"):
        buffer.seek(0)
        yield tried(lambda where=where: torch.load(buffer, map_location=where))
    for thing in (
        torch.zeros,
        torch.nn.Linear,
        torch.manual_seed,
        torch.cuda.Stream,
        torch.compile,
    ):
        yield tried(lambda thing=thing: hashlib.sha256(pickle.dumps(thing)).hexdigest())
    yield tried(lambda: pickle.loads(pickle.dumps(nn.Linear(1, 1))).weight)


def collectives(rng: random.Random) -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.arange(float(rng.randint(2, 5)))
        out = torch.empty_like(x)
        size = [len(x)]
        for call in (
            lambda: (dist.all_reduce(x), x),
            lambda: (dist.all_gather([out], x), out),
            lambda: dist.all_gather([torch.empty(1), torch.empty(2)], x),
            lambda: (dist.all_to_all_single(out, x, size, size), out),
            lambda: (dist.all_to_all_single(out, x, torch.tensor(size), torch.tensor(size)), out),
            lambda: (dist.reduce_scatter(out, [x]), out),
            lambda: (dist.reduce_scatter(out, [x, x[:1]]), out),
            lambda: dist.get_backend(),
            lambda: dist.all_reduce(x, async_op=True).wait(),
        ):
            yield tried(call)
    finally:
        dist.destroy_process_group()


def identities(rng: random.Random) -> Iterator[Any]:
    for name in rng.sample((*SHAPED, *LIKE, "tensor", "arange", "compile", "manual_seed"), 8):
        thing = getattr(torch, name)
        yield [repr(thing).split(" at ")[0], getattr(thing, "__module__", None)]
    for name in ("current_device", "Stream", "current_stream", "manual_seed", "device_count"):
        thing = getattr(torch.cuda, name)
        yield [thing.__module__, thing.__qualname__, str(inspect.signature(thing))]
    for name in ("all_gather", "all_to_all_single", "reduce_scatter"):
        yield inspect.getfile(inspect.unwrap(getattr(dist, name))).rsplit("/", 1)[-1]
    yield [
        torch.cuda.random is sys.modules["torch.cuda.random"],
        torch.cuda is sys.modules["torch.cuda"],
    ]
    yield sorted(str(thing) for thing in torch.utils._device._device_constructors())
    yield torch.Tensor.type.__qualname__
    yield torch.Tensor.cuda.__name__


def process(rng: random.Random) -> Iterator[Any]:
    """Yields the state of this process, such as environment variables and signal handlers."""
    yield dict(os.environ)
    for name in ("", "torch", "transformers", "accelerate", "peft", "torch.distributed"):
        logger = logging.getLogger(name)
        yield [name, logger.level, logger.propagate, len(logger.handlers), logger.disabled]
    yield [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__]
    yield [
        str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ]
    yield [
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ]
    yield [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]
    yield [
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.get_deterministic_debug_mode(),
    ]
    yield [importlib.util.find_spec("grouped_gemm") is None, "grouped_gemm" in sys.modules]
    yield tried(lambda: importlib.import_module("grouped_gemm"))
    yield sys.getrecursionlimit()


def complaints(rng: random.Random) -> Iterator[Any]:
    """Raises several warnings, and yields those that the current filters do not hide."""
    shown: list[str] = []
    former = warnings.showwarning
    warnings.showwarning = lambda message, kind, *rest: shown.append(f"{kind.__name__}: {message}")
    number = rng.random()
    try:
        for text in ("it is deprecated", "Apex is missing", "cuda_graph_scope", "plain"):
            for kind in (UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning):
                for module in ("torch.nn.init", "mine", "megatron_core", "transformers.models"):
                    warnings.warn_explicit(f"{text} {number}", kind, "file.py", 1, module)
    finally:
        warnings.showwarning = former
    yield shown


def availability(rng: random.Random) -> Iterator[Any]:
    """Yields which optional packages transformers, accelerate and peft find."""
    for library in (
        "transformers.utils.import_utils",
        "accelerate.utils.imports",
        "peft.import_utils",
    ):
        for name, question in sorted(vars(importlib.import_module(library)).items()):
            if re.fullmatch(r"is_\w+_available", name) and callable(question):
                yield [name, tried(question)]


def configuration(rng: random.Random) -> Any:
    """Returns the configuration of a tiny model. The model family is chosen at random."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 24, "max_position_embeddings": 32}
    families: tuple[Callable[[], Any], ...] = (
        lambda: transformers.LlamaConfig(**sizes, **more),
        lambda: transformers.Qwen2Config(**sizes, **more, num_key_value_heads=1),
        lambda: transformers.MistralConfig(**sizes, **more, num_key_value_heads=2),
        lambda: transformers.GemmaConfig(**sizes, **more, head_dim=8, num_key_value_heads=1),
        lambda: transformers.GPTNeoXConfig(**sizes, **more),
        lambda: transformers.GPT2Config(
            vocab_size=40,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=1,
        ),
        lambda: transformers.OPTConfig(
            **sizes, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=16
        ),
    )
    return rng.choice(families)()


def model_of(rng: random.Random) -> Any:
    torch.manual_seed(rng.randint(0, 99))
    return transformers.AutoModelForCausalLM.from_config(configuration(rng))


def loss_of(model: Any, seed: int = 1) -> Any:
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=tokens, labels=tokens).loss


def models(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    yield seen(model)
    loss = loss_of(model)
    loss.backward()
    yield seen(loss)
    yield seen({name: weight.grad for name, weight in model.named_parameters()})


def loaded(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Fill memory with nonzero values and free it. A tensor that uses this memory uninitialized
        # then has other values than expected.
        rubbish = [torch.full((n,), 7.0) for n in range(1, 64)]
        del rubbish
        for options in (
            {},
            {"dtype": torch.bfloat16},
            {"device_map": "cpu"},
            {"device_map": {"": "cpu"}},
            {"device_map": "meta"},
            {"device_map": "auto"},
            {"device_map": "cuda"},
        ):
            if rng.random() < 0.5:
                continue

            def load(options: dict[str, Any] = options) -> Any:
                read = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
                is_real = all(weight.device.type != "meta" for weight in read.parameters())
                return [read, loss_of(read) if is_real else None]

            yield tried(load)
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
        yield seen(skeleton)


def generated(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    model.eval()
    start = torch.tensor([[2, 3]])
    yield tried(lambda: model.generate(start, max_new_tokens=5, do_sample=False, pad_token_id=0))
    transformers.set_seed(rng.randint(0, 9))
    yield tried(lambda: model.generate(start, max_new_tokens=5, do_sample=True, pad_token_id=0))
    yield tried(lambda: torch.rand(1))


def empty_weights(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    with accelerate.init_empty_weights(include_buffers=rng.random() < 0.5):
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
        yield seen(skeleton)
        yield tried(lambda: nn.Linear(2, 2).weight)
    with accelerate.init_on_device(torch.device("meta")):
        yield tried(lambda: [nn.Linear(2, 2).weight, torch.zeros(2)])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "model.safetensors")

        def dispatch() -> Any:
            with accelerate.init_empty_weights():
                made = transformers.AutoModelForCausalLM.from_config(model.config)
            made.tie_weights()
            made = accelerate.load_checkpoint_and_dispatch(made, str(file), device_map={"": "cpu"})
            return [made, loss_of(made)]

        yield tried(dispatch)
    yield tried(lambda: accelerate.infer_auto_device_map(skeleton, max_memory={"cpu": 10**9}))
    yield tried(lambda: sorted(map(str, accelerate.utils.get_max_memory())))


def accelerated(rng: random.Random) -> Iterator[Any]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.utils.set_seed(rng.randint(0, 9))
    job = accelerate.Accelerator(cpu=rng.random() < 0.5)
    yield [str(job.device), str(job.distributed_type), job.num_processes, job.mixed_precision]
    model = nn.Linear(3, 1)
    made = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loss = made[0](torch.ones(2, 3)).sum()
    job.backward(loss)
    made[1].step()
    yield seen([loss, made[0].weight])
    AcceleratorState._reset_state(reset_partial_state=True)


def adapters(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    torch.manual_seed(rng.randint(0, 99))
    settings: Any = rng.choice(
        (
            lambda: peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
            lambda: peft.LoraConfig(
                r=4, target_modules="all-linear", use_dora=True, init_lora_weights="gaussian"
            ),
            lambda: peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
            lambda: peft.VeraConfig(r=2, target_modules="all-linear"),
        )
    )()

    def wrap() -> Any:
        return peft.get_peft_model(model, settings, low_cpu_mem_usage=rng.random() < 0.3)

    wrapped = None
    try:
        wrapped = wrap()
    except Exception as error:
        yield [type(error).__name__, str(error)[:100]]
    if wrapped is None or any(weight.device.type == "meta" for weight in wrapped.parameters()):
        return
    yield seen(wrapped)
    loss = loss_of(wrapped)
    loss.backward()
    yield seen(loss)
    with tempfile.TemporaryDirectory() as folder:
        wrapped.save_pretrained(folder)
        base = transformers.AutoModelForCausalLM.from_config(model.config)
        yield tried(lambda: loss_of(peft.PeftModel.from_pretrained(base, folder)))
    yield tried(lambda: wrapped.merge_and_unload())


def trained_by_transformers(rng: random.Random) -> Iterator[Any]:
    model = model_of(rng)
    rows = [{"input_ids": [n, n + 1, n + 2], "labels": [n, n + 1, n + 2]} for n in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=rng.random() < 0.5,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            seed=rng.randint(0, 9),
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        yield seen(trainer.train().training_loss)
    yield seen(model)


# The rare statements are slow, so few programs contain them.
COMMON: tuple[Statement, ...] = (
    *(factories, device_contexts, default_device, default_dtype, seeds, seeds_of_cuda),
    *(answers_of_cuda, moves, types, transforms, modes, training, storing, collectives),
    *(identities, complaints, models, loaded, generated, empty_weights, adapters),
)
RARE: tuple[Statement, ...] = (
    process,
    availability,
    compiled,
    accelerated,
    trained_by_transformers,
)
STATEMENTS = COMMON + RARE


def program(seed: int) -> list[Statement]:
    """Returns the statements of the program with the number ``seed``."""
    if seed < len(STATEMENTS):
        return [STATEMENTS[seed]]
    rng = random.Random(f"program {seed}")
    chosen = [rng.choice(COMMON) for _ in range(rng.randint(1, 4))]
    return chosen + ([rng.choice(RARE)] if rng.random() < 0.15 else [])


def observe(seed: int) -> list[Any]:
    """Runs the program with the number ``seed``, and returns its observations."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    observed: list[Any] = []
    for number, statement in enumerate(program(seed)):
        rng = random.Random(f"{seed} {number}")
        observed.append(statement.__name__)
        try:
            observed.extend(seen(each) for each in statement(rng))
        except Exception as error:
            observed.append([type(error).__name__, str(error).splitlines()[:1]])
    return observed


def main() -> None:
    transformers.logging.set_verbosity_error()
    first = [seen(torch.get_rng_state()), torch.initial_seed() < 0]
    results = [[first[1]], *(observe(int(word)) for word in sys.argv[3:])]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
