"""Progress of long work: code reports its stages, and a listener shows them."""

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from keras_tpu_dist.common.setting import setting


@dataclass(frozen=True)
class Stage:
    """The current stage of some work.

    Attributes:
        work: The work, such as `"dry run"`.
        words: The current stage; `None` once the work has ended.
        depth: 0 for the outermost work, 1 for work that is a stage of it, and so on.
    """

    work: str
    words: str | None
    done: int
    of: int
    depth: int


Listener = Callable[[Stage], None]


@dataclass(frozen=True)
class _Current:
    """The listener, and the number of works around the current one."""

    listener: Listener | None = None
    depth: int = 0


# Without a listener, slow work says after so many seconds that it runs.
SILENT_S = 10.0
_NONE = _Current()
_excuses: set[str] = set()
_current: contextvars.ContextVar[_Current] = contextvars.ContextVar("progress", default=_NONE)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A context in which a listener gets every stage.

    Args:
        listener: Called with every `Stage`, in the thread that computes.
    """
    with setting(_current, replace(_current.get(), listener=listener)):
        yield


@contextlib.contextmanager
def stages(work: str, of: int) -> Iterator[Callable[[str], None]]:
    """Work of several stages, reported to the listener if there is one.

    Args:
        work: The work.
        of: The number of its stages; more may come.

    Yields:
        A function to call at the start of every stage, with its words.
    """
    current, begun = _current.get(), 0
    listener, depth = current.listener, current.depth
    if listener is None:
        yield lambda words: None
        return

    def begin(words: str) -> None:
        nonlocal begun
        begun += 1
        listener(Stage(work, words, begun - 1, max(of, begun), depth))

    try:
        with setting(_current, replace(current, depth=depth + 1)):
            yield begin
    finally:
        listener(Stage(work, None, begun, max(of, begun), depth))


@contextlib.contextmanager
def excused(words: str) -> Iterator[None]:
    """A context that prints a line on standard error if it takes long and no listener is there.

    Args:
        words: The line, which is printed once in a process.
    """
    if _current.get().listener is not None or words in _excuses:
        yield
        return

    def excuse() -> None:
        if words not in _excuses:
            _excuses.add(words)
            print(words, file=sys.stderr, flush=True)

    timer = threading.Timer(SILENT_S, excuse)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """A context in which long work shows its stage and the number of stages left.

    The line appears on standard error, for dry runs, `search` and `restore`. If standard error is
    not a terminal, there is no such line, but the first compilation that takes ten seconds says how
    long it usually takes. Nested calls show the line only once.

    Example:

    >>> import keras, keras_tpu_dist as ktd
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> model.compile("adam", "mse")
    >>> with ktd.show_progress():
    ...     run = ktd.TPUStrategy().dry_run(model, batch_size=64)
    >>> run.batch_size
    64
    """
    if not sys.stderr.isatty() or _current.get().listener is not None:
        yield
        return
    with _line() as listener, listening(listener):
        yield


@contextlib.contextmanager
def _line() -> Iterator[Listener]:
    """A listener that draws one line for every depth of work."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        # Output of a model's function appears above the line, or goes to its redirection.
        redirect_stdout=sys.stdout.isatty(),
    )
    with shown:
        tasks = {}

        def listen(stage: Stage) -> None:
            if stage.words is None:
                if stage.depth in tasks:
                    shown.remove_task(tasks.pop(stage.depth))
                return
            words = f"{'  ' * stage.depth}{stage.work}: {stage.words}"
            if stage.depth not in tasks:
                tasks[stage.depth] = shown.add_task(words, total=stage.of, completed=stage.done)
            else:
                now = {"description": words, "completed": stage.done, "total": stage.of}
                shown.update(tasks[stage.depth], **now, refresh=True)

        yield listen
