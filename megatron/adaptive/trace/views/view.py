"""Defines the interface of a view of a trace, and finds the views for ``trace --format``.

A view is a function decorated with :func:`trace_view`. The views of this package are the modules of
the folder ``formats``, which are found without registration. Users can define views in any module,
and pass them as ``--format package.module:name``. A package can also publish views as entry points
of the group ``megatron_adaptive.views``, whose names can be passed to ``--format``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.adaptive.config.own_code import find_object, line_of_error, modules_in, source_of
from megatron.adaptive.errors import AdaptiveError, ConfigError, TraceError
from megatron.adaptive.trace.files import make_parent

if TYPE_CHECKING:
    from megatron.adaptive.trace.metrics import RunFigures
    from megatron.adaptive.trace.read import RunTrace
    from megatron.adaptive.trace.step_view import PipelineStep

ALL = "all"
"""Value of ``--format`` that selects all views of this package."""

ENTRY_POINTS = "megatron_adaptive.views"
"""Name of the group of entry points through which installed packages provide views."""


@dataclass(frozen=True, kw_only=True)
class ViewInput:
    """Contains the input of a view: the run, iterations and ranks that the user chose.

    Attributes:
        run: Trace of the run.
        step: Actions and waits of the iteration to draw.
        iterations: Numbers of the iterations in ``figures`` in ascending order, including the
            iteration to draw.
        dp_rank: Data-parallel replica that the user chose, or ``None``. With ``None``, the first
            replica is drawn.
    """

    run: RunTrace
    step: PipelineStep
    iterations: tuple[int, ...]
    dp_rank: int | None

    @cached_property
    def figures(self) -> RunFigures:
        """Statistics of the drawn replica's ranks, computed at the first access."""
        from megatron.adaptive.trace.metrics import run_figures

        traces = self.run.replica(self.step.dp_rank)
        ranks = [trace.header.rank for trace in traces if trace is not None]
        return run_figures(self.run, self.iterations, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class View:
    """Describes a view, one of the values of ``--format``.

    Attributes:
        name: Name of the view on the command line.
        ending: End of the file name, such as ``.xlsx``. The file names of all views of a run only
            differ in their endings. The ending is empty if the view is printed instead of being
            written to a file.
        summary: Short description of the view for help texts.
        function: Function that writes or returns the view (see :func:`trace_view`).
        is_own: Whether the view was defined by a user instead of this package.
    """

    name: str
    ending: str
    summary: str
    function: Callable[..., Any]
    is_own: bool = False

    def show(self, shown: ViewInput, stem: Path) -> str:
        """Writes the view to its file, and returns a description and notes, one per line.

        If the view has no file, returns the text of the view instead.

        Args:
            shown: Run, iterations and ranks that the user chose.
            stem: Path of the file without the ending.

        Raises:
            TraceError: The run does not contain data that the view needs, the file cannot be
                written, or a user-defined function raised an error.
        """
        path = Path(f"{stem}{self.ending}")
        if self.ending:
            make_parent(path)
        try:
            result = self.function(shown, path) if self.ending else self.function(shown)
            lines = [result] if isinstance(result, str) else [str(line) for line in result or ()]
        except AdaptiveError:
            raise
        except Exception as error:  # A user's function may raise any exception.
            if not self.is_own:
                raise
            line = line_of_error(error, self.function)
            raise TraceError(
                f"view {self.name} ({source_of(self.function)}): {line} raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self.ending:
            return "\n".join(lines)
        description, *notes = lines or [self.summary]
        return "\n  ".join([f"{description}: {path.resolve()}", *notes])


def trace_view(
    *, ending: str, summary: str, name: str = ""
) -> Callable[[Callable[..., Any]], View]:
    """Returns a decorator that turns a function into a :class:`View`.

    The function takes a :class:`ViewInput` and the :class:`~pathlib.Path` of the file to write,
    whose folder exists. To replace the file atomically, use ``replaced(path)`` of
    ``trace/files.py``. The function returns a line that describes the file, such as ``iteration 5
    drawn``. It may also return a list with such a line and notes, or ``None``.

    If ``ending`` is empty, the function takes only the :class:`ViewInput`, and returns the text to
    print or its lines.

    Args:
        ending: End of the file name, such as ``.csv``; empty for a view that is printed.
        summary: Short description of the view for help texts.
        name: Name of the view on the command line. Only used for views of this package.
    """
    return lambda function: View(
        name=name or f"{function.__module__}:{function.__name__}",
        ending=ending,
        summary=summary,
        function=function,
        is_own=not name,
    )


def built_in_views() -> dict[str, View]:
    """Returns all views in the modules of ``formats``, keyed by name."""
    from megatron.adaptive.trace.views import formats

    values = [value for module in modules_in(formats) for value in vars(module).values()]
    views = {value.name: value for value in values if isinstance(value, View) and not value.is_own}
    return dict(sorted(views.items()))


def find_views(names: Iterable[str]) -> tuple[View, ...]:
    """Returns the views called ``names``, without duplicates.

    Args:
        names: Names of views of this package, names of entry points, or ``package.module:name`` of
            a user-defined view. ``all`` means all views of this package.

    Raises:
        ConfigError: A view does not exist, or its module cannot be imported.
    """
    table = built_in_views()
    expanded = [each for name in names for each in (table if name == ALL else (name,))]
    return tuple(
        table[name] if name in table else _own_view(name, table) for name in dict.fromkeys(expanded)
    )


def refuse_shared_files(views: Sequence[View]) -> None:
    """Raises ``ConfigError`` if several of ``views`` would write the same file."""
    by_ending: dict[str, View] = {}
    for view in views:
        other = by_ending.setdefault(view.ending, view)
        if view.ending and other is not view:
            raise ConfigError(
                f"argument --format: {other.name} and {view.name} both write a file that ends in "
                f"{view.ending!r}; choose one view, or use another ending for your own view"
            )


def _own_view(name: str, table: Iterable[str]) -> View:
    loaded = find_object(name, group=ENTRY_POINTS, subject="view")
    if loaded is None:
        raise ConfigError(
            f"argument --format: invalid choice {name!r}; choose from {', '.join(table)}, or "
            f"{ALL}, or pass package.module:name of your own view"
        )
    if not isinstance(loaded, View):
        raise ConfigError(
            f"view {name} must be a function decorated with trace_view of "
            f"megatron.adaptive.trace.views, got {type(loaded).__name__} {loaded!r:.60}"
        )
    return replace(loaded, name=name, is_own=True)
