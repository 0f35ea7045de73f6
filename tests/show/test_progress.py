import io
import threading

from keras_tpu_dist.show import progress
from keras_tpu_dist.show.progress import Stage, excused, listening, show_progress, stages


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Log(io.StringIO):
    def __init__(self):
        super().__init__()
        self.printed = threading.Event()

    def flush(self):
        self.printed.set()


def test_stages_within_stages():
    heard = []
    with listening(heard.append), stages("comparing", 2) as begin:
        begin("data 8")
        with stages("dry run", 1) as inner:
            inner("compiling")
            inner("again")  # more than was known of
        begin("data 4")
    assert heard == [
        Stage("comparing", "data 8", 0, 2, 0),
        Stage("dry run", "compiling", 0, 1, 1),
        Stage("dry run", "again", 1, 2, 1),
        Stage("dry run", None, 2, 2, 1),
        Stage("comparing", "data 4", 1, 2, 0),
        Stage("comparing", None, 2, 2, 0),
    ]


def test_work_that_fails_ends_too():
    heard = []
    try:
        with listening(heard.append), stages("dry run", 2) as begin:
            begin("building")
            raise KeyError("no")
    except KeyError:
        pass
    assert heard[-1] == Stage("dry run", None, 1, 2, 0)
    with stages("dry run", 2) as begin:
        begin("nobody listens")
    assert len(heard) == 2


def test_nothing_is_shown_where_no_terminal_is(capsys):
    with show_progress(), stages("dry run", 1) as begin:
        begin("compiling")
    assert capsys.readouterr() == ("", "")


def test_slow_work_without_a_terminal_says_once_that_it_runs(monkeypatch, capsys):
    log = Log()
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr(progress, "SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_excuses", set())
    with show_progress(), excused("it takes long"):
        assert log.printed.wait(10)
    assert log.getvalue() == "it takes long\n"
    monkeypatch.setattr(progress, "SILENT_S", 10)
    with excused("it takes long"), excused("it is fast"):
        pass
    with listening(lambda stage: None), excused("a line shows it"):
        pass
    assert log.getvalue() == "it takes long\n"
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_stage_and_what_is_left(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stderr", terminal)
    with show_progress(), show_progress(), stages("comparing", 2) as begin:
        for mesh in ("data 8", "data 4"):
            begin(mesh)
            with stages("dry run", 1) as inner:
                inner("compiling")
                inner("compiling again")
                print("kept apart")
    shown = terminal.getvalue()
    for words in ("comparing: data 4", "dry run: compiling again", "1/2"):
        assert words in shown
    assert "kept" not in shown
    assert capsys.readouterr().out == "kept apart\n" * 2
    # the line is gone once the work has ended
    assert shown.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h"))
