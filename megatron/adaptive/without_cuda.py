"""Lets an **unmodified** megatron-core run on a machine without CUDA.

megatron-core passes the device ``"cuda"`` to tensor factories such as ``torch.zeros``, asks
``torch.cuda`` for the current device and its random state, and compares ``Tensor.type()`` with
``torch.cuda.*`` names. This module gives megatron-core a stand-in for the ``torch`` module, with a
substitute for each of these functions. The stand-in looks up all other names in torch itself when
they are used::

    megatron.core.x    import torch ──> stand-in ── torch.zeros ──> substitute ──> torch.zeros
                                            └────── torch.matmul ────────────────> torch.matmul
    transformers, ...  import torch ─────────────────────────────────────────────> torch

An import hook (a finder at the head of ``sys.meta_path``) gives Megatron-LM's modules an
``__import__`` that returns the stand-ins. torch is unchanged for all other libraries, so both torch
and the stand-ins can be used in one process. The methods ``Tensor.cuda()`` and ``Module.cuda()``
belong to classes that all libraries share, so they are replaced for all libraries. The replacements
check their caller, and differ from torch's methods only if a module of Megatron-LM calls them.

Each function ``_substitute_*`` makes one substitution and has its own test. If a new release of
torch or megatron-core breaks a substitution, its test fails. If CUDA is available, this module
changes nothing.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.adaptive.errors import SetupError

_CPU = torch.device("cpu")
_OWN_PACKAGE = "megatron.adaptive"
_SUBSTITUTED = ("megatron.", "emerging_optimizers")
"""Name prefixes of the modules that use the substitutes.

``emerging_optimizers`` is a package that megatron-core imports if it is installed. It compiles
functions during its import, which the substitute for ``torch.compile`` prevents.
"""
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
# Maps the result of ``Tensor.type()`` for a GPU tensor to the result for a CPU tensor.
_TYPE_NAMES = {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("BFloat16", "Float", "Half")
}


def install() -> bool:
    """Lets megatron-core run without CUDA. Does nothing if there is a GPU, or on a second call.

    Call this function before the first import of ``megatron.core``. Only modules of Megatron-LM get
    the substitutes. torch is unchanged for all other modules.

    Returns:
        Whether the substitutes are installed.

    Raises:
        SetupError: ``megatron.core`` was imported before the first call.
    """
    if torch.cuda.is_available():
        return False
    if _installed() is not None:
        return True
    if "megatron.core.tensor_parallel" in sys.modules:
        raise SetupError(
            "megatron.core was imported before megatron.adaptive.accelerator.install(); "
            "call install() first on a machine without CUDA"
        )
    finder = Finder()
    _substitute_current_device(finder)
    _substitute_synchronize(finder)
    _substitute_streams(finder)
    _substitute_factories(finder)
    _substitute_tensor_moves(finder)
    _substitute_tensor_type(finder)
    _substitute_random_state(finder)
    _substitute_compiler(finder)
    _substitute_grouped_products(finder)
    _substitute_exchanged_parts(finder)
    _substitute_unequal_parts(finder)
    _adapt_trainer(finder)
    sys.meta_path.insert(0, finder)
    return True


def install_for_trainer() -> bool:
    """Lets Megatron-LM's own trainer also run without CUDA. Does nothing if there is a GPU.

    This function is called when ``megatron.training.initialize`` is imported after :func:`install`.

    Returns:
        Whether the substitutes are installed.
    """
    if not install():
        return False
    finder = _installed()
    assert finder is not None
    # Report compute capability 10. For older GPUs, the trainer requires the setting
    # CUDA_DEVICE_MAX_CONNECTIONS=1.
    properties = types.SimpleNamespace(name="CPU", major=10, minor=0)
    # The trainer only creates process groups and sets seeds if there is at least one device.
    finder.substitutes("torch.cuda").update(
        device_count=lambda: 1,
        set_device=lambda device: None,
        get_device_properties=lambda device=None: properties,
    )
    return True


def include_program(namespace: dict[str, Any]) -> None:
    """Extends the substitution to the modules of a user's program that uses Megatron-LM.

    The program consists of the calling module, the modules in the same folder, and the modules in
    the folder that contains Megatron-LM (such as ``gpt_builders.py``). A module gets the
    substitutes only if it has imported something from Megatron-LM. To include modules that are
    imported later, call :func:`renew_program`. This function does nothing unless :func:`install`
    has installed the substitutes.

    Args:
        namespace: Global names of the calling module, as returned by ``globals()``.
    """
    finder = _installed()
    if finder is not None and not _is_own(namespace.get("__name__", "")):
        finder.include_program(namespace)


def renew_program() -> None:
    """Extends the substitution to modules imported since :func:`include_program`.

    Call this function before the first training step. The code of these modules has already run, so
    this function replaces their global names that refer to functions of torch.
    """
    finder = _installed()
    if finder is not None:
        finder.renew_program()


def _as_part_of_import(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of ``function`` whose stack frames look like those of the import system.

    The ``warnings`` module skips such stack frames. Without the copy, a warning about an import
    would point to this file instead of the code that imports the module.
    """
    code = function.__code__.replace(co_filename="<importlib._bootstrap of megatron.adaptive>")
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


class _Names(dict[str, Any]):
    """Dictionary of substitutes, keyed by name. Looks up other names in the original module.

    Looking up a key of a dictionary runs no Python code. This matters because megatron-core looks
    up about a hundred names of torch in each layer.
    """

    # Python looks up special methods in the class instead of the instance, so each original module
    # needs its own subclass.
    __missing__: Callable[[str], Any]


def _stand_in(module: types.ModuleType) -> tuple[types.ModuleType, dict[str, Any]]:
    """Returns a module that stands in for ``module``, and the dictionary of its substitutes."""
    missing = {"__missing__": module.__getattribute__}
    names: dict[str, Any] = type("_Names", (_Names,), missing)()
    methods = {
        "__getattribute__": names.__getitem__,
        "__setattr__": module.__setattr__,
        "__delattr__": module.__delattr__,
    }
    return type("StandIn", (types.ModuleType,), methods)(module.__name__), names


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules of Megatron-LM, and lets them import stand-ins instead of torch's modules.

    Attributes:
        builtins: Built-in names for modules of Megatron-LM, with an ``__import__`` that returns
            stand-ins. A module whose ``__builtins__`` is this dictionary uses the substitutes.
        constants: Replacements for string constants in the code of Megatron-LM, keyed by the
            original string.
        adaptations: Functions that change a module of Megatron-LM immediately after its import,
            keyed by the name of the module.
    """

    def __init__(self) -> None:
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        self.constants: dict[Any, Any] = {}
        self.adaptations: dict[str, Callable[[types.ModuleType], None]] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._substitutes: dict[str, dict[str, Any]] = {}
        self._programs: list[dict[str, Any]] = []
        for module in (torch.cuda.random, torch.cuda, dist, torch):
            self._modules[module.__name__], names = _stand_in(module)
            self._substitutes[module.__name__] = names
        self.substitutes("torch.cuda")["random"] = self._modules["torch.cuda.random"]
        self.substitutes("torch")["cuda"] = self._modules["torch.cuda"]
        self.substitutes("torch")["distributed"] = self._modules["torch.distributed"]

    def substitutes(self, module: str) -> dict[str, Any]:
        """Returns the substitutes for names of ``module``. Callers may add more substitutes."""
        return self._substitutes[module]

    def add_module(self, module: types.ModuleType) -> None:
        """Lets modules of Megatron-LM, and no others, import ``module`` by its name."""
        self._modules[module.__name__] = module

    def remove_module(self, name: str) -> types.ModuleType:
        """Removes and returns the module ``name`` that :meth:`add_module` has added."""
        return self._modules.pop(name)

    def calls_from(self, frame: types.FrameType) -> bool:
        """Returns whether ``frame`` runs code of a module that uses the substitutes."""
        return frame.f_globals.get("__builtins__") is self.builtins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the import spec of ``fullname``, or ``None`` if it is not part of Megatron-LM."""
        if not fullname.startswith(_SUBSTITUTED) or _is_own(fullname):
            return None
        # Between two imports of Megatron-LM modules, the program's main module may run code that
        # uses torch. Replace the torch names in the main module at each of these imports.
        self._replace_in(self._programs)
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(fullname, path, target)
            if spec is not None:
                break
        # Only modules with Python source need substitutes. C modules and namespace packages have
        # other loaders.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(self, spec.loader)
        return spec

    def include_program(self, namespace: dict[str, Any]) -> None:
        """Includes the program whose main module has the globals ``namespace``."""
        if not any(program is namespace for program in self._programs):
            self._programs.append(namespace)
        self.renew_program()

    def renew_program(self) -> None:
        """Extends the substitution to all modules of the program that use Megatron-LM."""
        self._replace_in(self._modules_of_program())

    def _replace_in(self, namespaces: list[dict[str, Any]]) -> None:
        users = [namespace for namespace in namespaces if _uses_megatron(namespace)]
        replaced = self._replacements() if users else {}
        for namespace in users:
            namespace["__builtins__"] = self.builtins
            for name, value in list(namespace.items()):
                if id(value) in replaced:
                    namespace[name] = replaced[id(value)]

    def _replacements(self) -> dict[int, Any]:
        """Returns all stand-ins and substitutes, keyed by the ``id`` of the torch object."""
        replaced: dict[int, Any] = {}
        for name, names in self._substitutes.items():
            module = sys.modules[name]
            replaced[id(module)] = self._modules[name]
            for attribute, substitute in names.items():
                original = getattr(module, attribute, None)
                if callable(original):
                    replaced[id(original)] = substitute
        return replaced

    def _modules_of_program(self) -> list[dict[str, Any]]:
        """Returns the global names of each module that may be part of the user's program."""
        if not self._programs:
            return []
        files = [program.get("__file__") for program in self._programs]
        folders = {Path(file).resolve().parent for file in files if file is not None}
        for folder in map(Path, sys.modules["megatron"].__path__):
            if (folder / "core").is_dir() or (folder / "training").is_dir():
                folders.add(folder.resolve().parent)
        prefixes = tuple(f"{folder}{os.sep}" for folder in folders)
        namespaces = list(self._programs)
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", {})
            file = namespace.get("__file__")
            if isinstance(file, str) and file.startswith(prefixes) and not _is_installed(file):
                namespaces.append(namespace)
        return namespaces

    @_as_part_of_import
    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Works like ``__import__``, but returns the stand-in of ``name`` if there is one."""
        # __import__ must return the module a for the statement "import a.b", and the module a.b for
        # "from a.b import c".
        returned = name if fromlist else name.partition(".")[0]
        stand_in = None if level else self._modules.get(returned)
        if stand_in is not None and returned not in self._substitutes:
            return stand_in  # The package that this module stands in for may not be installed.
        module = builtins.__import__(name, globals, locals, fromlist or (), level)
        return module if stand_in is None else stand_in


class _Loader(SourceFileLoader):
    """Loads a module of Megatron-LM so that it uses the substitutes."""

    def __init__(self, finder: Finder, plain: SourceFileLoader) -> None:
        super().__init__(plain.name, plain.path)
        self._finder = finder

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Returns the code of a module with replaced constants. Does not change ``__pycache__``."""
        code = super().get_code(fullname)
        return None if code is None else _with_constants(code, self._finder.constants)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Returns a new module whose ``__import__`` returns stand-ins for torch's modules."""
        module = types.ModuleType(spec.name)
        module.__dict__["__builtins__"] = self._finder.builtins
        return module

    @_as_part_of_import
    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the code of ``module``, and then the function that adapts it, if any."""
        super().exec_module(module)
        adapt = self._finder.adaptations.get(module.__name__)
        if adapt is not None:
            adapt(module)


def _with_constants(constant: Any, replacements: dict[Any, Any]) -> Any:
    """Returns ``constant`` with its strings replaced, including strings in nested constants."""
    if isinstance(constant, str):
        return replacements.get(constant, constant)
    if isinstance(constant, types.CodeType):
        inner = _with_constants(constant.co_consts, replacements)
        return constant if inner is constant.co_consts else constant.replace(co_consts=inner)
    if not isinstance(constant, tuple | frozenset):
        return constant
    parts = [_with_constants(part, replacements) for part in constant]
    is_same = all(new is old for new, old in zip(parts, constant, strict=True))
    return constant if is_same else type(constant)(parts)


def _installed() -> Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def _is_own(name: str) -> bool:
    return name == _OWN_PACKAGE or name.startswith(_OWN_PACKAGE + ".")


def _is_installed(file: str) -> bool:
    # Compare strings, because pathlib would take 0.25 s for the thousands of modules of a program.
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def _uses_megatron(namespace: dict[str, Any]) -> bool:
    """Returns whether any global name in ``namespace`` was imported from Megatron-LM."""
    for value in list(namespace.values()):
        if isinstance(value, types.ModuleType):
            origin = value.__name__
        elif isinstance(value, type | types.FunctionType):
            origin = value.__module__
        else:
            continue
        if str(origin).startswith("megatron.") and not _is_own(origin):
            return True
    return False


def _substitute_current_device(finder: Finder) -> None:
    """Makes ``current_device()`` return the CPU. megatron-core passes the result as ``device``."""
    finder.substitutes("torch.cuda")["current_device"] = lambda: _CPU


def _substitute_synchronize(finder: Finder) -> None:
    """Makes ``torch.cuda.synchronize()`` do nothing, because work on a CPU is already complete."""
    finder.substitutes("torch.cuda").update(
        synchronize=lambda device=None: None, empty_cache=lambda: None
    )


class _NoStream:
    """Stands in for a CUDA stream or event. Never waits, because CPU work is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _NoStream:
        """Returns a stand-in for an event that has already completed."""
        return self


def _substitute_streams(finder: Finder) -> None:
    """Replaces CUDA streams by :class:`_NoStream`, whose methods do nothing."""
    finder.substitutes("torch.cuda").update(
        Stream=_NoStream,
        current_stream=lambda device=None: _NoStream(),
        stream=lambda stream: contextlib.nullcontext(),
    )


def _is_cuda_name(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _substitute_factories(finder: Finder) -> None:
    """Makes ``torch.zeros(..., device="cuda")`` and the other factories create CPU tensors."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs and _is_cuda_name(kwargs["device"]):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        finder.substitutes("torch")[name] = on_cpu(getattr(torch, name))


def _substitute_tensor_moves(finder: Finder) -> None:
    """Makes ``Tensor.cuda()`` and ``Module.cuda()`` leave tensors on the CPU.

    This applies only to calls from modules of Megatron-LM. All other callers get torch's methods,
    which raise an error on a machine without CUDA.
    """

    def unless_called_by_megatron(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
            if finder.calls_from(sys._getframe(1)):
                return self
            return method(self, *args, **kwargs)

        return cuda

    kinds: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for kind in kinds:
        kind.cuda = unless_called_by_megatron(kind.cuda)


def _substitute_tensor_type(finder: Finder) -> None:
    """Replaces the names of CUDA tensor types in megatron-core's code with names of CPU types.

    megatron-core's optimizers group parameters by ``Tensor.type()``, and reject parameters whose
    type is not one of these names.
    """
    finder.constants.update(_TYPE_NAMES)


def _substitute_random_state(finder: Finder) -> None:
    """Lets megatron-core fork, save and restore the CPU's random state instead of CUDA's."""
    for module in ("torch.cuda", "torch.cuda.random"):
        finder.substitutes(module).update(
            get_rng_state=lambda device="cuda": torch.get_rng_state(),
            set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
            manual_seed=lambda seed: torch.manual_seed(seed),
        )
    # megatron-core sets the random state of `default_generators[device.index]` through _lazy_call.
    # torch would delay that call until CUDA is initialized, but CUDA is not available.
    finder.substitutes("torch.cuda").update(
        _lazy_call=lambda call, **kwargs: call(),
        default_generators=_AnyIndex(torch.default_generator),
    )


def _substitute_compiler(finder: Finder) -> None:
    """Makes ``torch.compile`` return functions of Megatron-LM uncompiled.

    On a CPU, the first call of a compiled function takes half a minute. Calling ``torch.compile``
    also loads the compiler, which takes a third of a process's startup time. To enable compilation
    again, set the environment variable ``TORCHDYNAMO_DISABLE=0``.
    """

    def compile_if_asked(model: Any = None, **options: Any) -> Any:
        if os.environ.get("TORCHDYNAMO_DISABLE") == "0":
            return torch.compile(model, **options)
        return functools.partial(compile_if_asked, **options) if model is None else model

    finder.substitutes("torch")["compile"] = compile_if_asked


def _substitute_grouped_products(finder: Finder) -> None:
    """Provides a package ``grouped_gemm`` with the only function that megatron-core calls.

    The real package saves kernel launches by computing the matrix products of all experts in one
    kernel. There are no kernel launches on a CPU, so one product per expert is equally fast.
    """

    def products(
        rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
    ) -> torch.Tensor:
        """Multiplies each expert's rows by the expert's matrix: ``[n, k], [e, k, m] -> [n, m]``."""
        parts = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
        return torch.cat([part @ (matrix.t() if trans_b else matrix) for part, matrix in parts])

    package = types.ModuleType("grouped_gemm")
    package.__dict__["ops"] = types.SimpleNamespace(gmm=products)
    finder.add_module(package)


def _substitute_exchanged_parts(finder: Finder) -> None:
    """Makes ``all_to_all_single`` accept tensors as the sizes of the exchanged parts.

    megatron-core converts such sizes to numbers only if the sizes are on a GPU. On a CPU, it passes
    them as tensors, which torch rejects.
    """

    def number(value: Any) -> Any:
        return value.tolist() if torch.is_tensor(value) else value

    @functools.wraps(dist.all_to_all_single)
    def exchange(output: torch.Tensor, input: torch.Tensor, *rest: Any, **options: Any) -> Any:
        named = {name: number(value) for name, value in options.items()}
        # Look up the function at each call, because this package replaces it while two microbatches
        # run concurrently.
        return dist.all_to_all_single(output, input, *map(number, rest), **named)

    finder.substitutes("torch.distributed")["all_to_all_single"] = exchange


def _substitute_unequal_parts(finder: Finder) -> None:
    """Makes all-gather and reduce-scatter accept parts of different sizes, which gloo rejects.

    megatron-core's token dispatchers use such parts if an expert is split across several ranks.
    """

    def differ(parts: list[torch.Tensor], options: dict[str, Any]) -> bool:
        return len({part.shape for part in parts}) > 1 and not options.get("async_op")

    @functools.wraps(dist.all_gather)
    def all_gather(
        parts: list[torch.Tensor], local: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        if not differ(parts, options):
            return dist.all_gather(parts, local, *args, **options)
        gathered = torch.cat(parts)
        sent = [len(local)] * len(parts)
        copies = local.repeat(len(parts), *[1] * (local.dim() - 1))
        sizes = [len(part) for part in parts]
        dist.all_to_all_single(gathered, copies, sizes, sent, *args, **options)
        for part, received in zip(parts, gathered.split(sizes), strict=True):
            part.copy_(received)
        return None

    @functools.wraps(dist.reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor, parts: list[torch.Tensor], *args: Any, **options: Any
    ) -> Any:
        # The code below can only compute sums. A positional argument may select another reduction.
        if args or not differ(parts, options):
            return dist.reduce_scatter(output, parts, *args, **options)
        received = output.new_empty(len(parts), *output.shape)
        lengths = [len(output)] * len(parts)
        sent = [len(part) for part in parts]
        dist.all_to_all_single(received.flatten(0, 1), torch.cat(parts), lengths, sent, **options)
        output.copy_(received.sum(dim=0))
        return None

    finder.substitutes("torch.distributed").update(
        all_gather=all_gather, reduce_scatter=reduce_scatter
    )


def _adapt_trainer(finder: Finder) -> None:
    """Lets Megatron-LM's own trainer start without CUDA.

    The trainer's ``initialize_megatron`` raises an assertion error unless ``allow_no_cuda`` is set.
    Up to release 0.16, it also runs the CUDA compiler for kernels that no longer exist.
    """

    def initialize(module: Any) -> None:
        install_for_trainer()
        module.initialize_megatron = _allowing_no_cuda(module.initialize_megatron)

    def compile_nothing(module: Any) -> None:
        module.load = lambda args: None

    finder.adaptations["megatron.training.initialize"] = initialize
    finder.adaptations["megatron.legacy.fused_kernels"] = compile_nothing


def _allowing_no_cuda(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``start`` (``initialize_megatron``), so that ``allow_no_cuda`` is always set.

    The position of this parameter differs between releases.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["allow_no_cuda"] = True
        return start(*bound.args, **bound.kwargs)

    return run


class _AnyIndex(tuple[Any, ...]):
    """Tuple that returns its single element for every index, even for a ``torch.device``."""

    def __new__(cls, element: Any) -> _AnyIndex:
        return super().__new__(cls, (element,))

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)
