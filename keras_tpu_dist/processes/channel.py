"""The host channel: messages between processes through JAX's coordinator, without the devices.

If one process does not launch a collective, the others cannot be interrupted. So before the host
starts one (a fit, reading a weight that is split over hosts, saving), all processes write their
next action, and all raise an error if the actions differ.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.processes.encoding import MALFORMED, decoded, encoded, malformed
from keras_tpu_dist.processes.encoding import PeerError as PeerError

_PREFIX = "keras_tpu_dist"
# The coordinator answers when the entry is there. After each wait, missing processes are checked.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
# If there are many processes, each looks less often, because one coordinator serves them.
_PROCESSES_PER_SECOND = 256
# A value with at most so many characters is written at once, whether others have the same or not.
_SHORT = 256
# Kinds of verdicts: all values are equal; they differ; write yours; this call has failed.
_SAME, _GIVEN, _SEND, _INVALID = "same", "given", "send", "invalid"
# The largest number of processes of a kind to name in an error.
_MOST_NAMED = 8

# Kinds of `Absence`: an error, the normal end of the program, silence, an unfinished call.
FAILED, ENDED, LEFT, SILENT, STUCK = "failed", "ended", "left", "silent", "stuck"


class Absence(NamedTuple):
    """Why a process will not come to an agreement.

    Attributes:
        kind: `FAILED`, `ENDED`, `LEFT` (within a call that all make), `SILENT` or `STUCK`.
    """

    kind: str
    words: str


class Channel:
    """This process's end of the channel.

    Args:
        client: JAX's client of the coordination service.
        process_id: This process.
        num_processes: The number of processes.
        why_not: Takes the missing processes and the seconds so far, and returns the reason to stop
            waiting, or `None`.
    """

    def __init__(
        self,
        client: Any,
        process_id: int,
        num_processes: int,
        why_not: Callable[[list[int], float], Absence | None] = lambda missing, waited_s: None,
    ):
        self._client = client
        self._process_id = process_id
        self._num_processes = num_processes
        self._names = {str(number) for number in range(num_processes)}
        self.why_not = why_not
        self._calls = 0

    def write(self, topic: str, value: Any) -> None:
        """Writes an entry that all processes can read.

        Args:
            topic: A name; it replaces this process's earlier entry for it.
            value: Plain data, for JSON.
        """
        key = f"{_PREFIX}/{topic}/{self._process_id}"
        self._client.key_value_set(key, encoded(value), allow_overwrite=True)

    def read(self, topic: str) -> dict[int, Any]:
        """The entries of the processes that have written one, by their numbers.

        Args:
            topic: A name.
        """
        return {i: decoded(text, where=f"{topic}/{i}") for i, text in self._texts(topic).items()}

    def read_valid(self, topic: str, convert: Callable[[Any], Any]) -> dict[int, Any]:
        """Like `read`, but an entry that cannot be converted counts as missing and is logged once.

        The watch uses it: a stranger's entry must not end a run.

        Args:
            topic: A name.
            convert: A function from an entry to its value; it raises for one of another form.
        """
        values = {}
        for i, text in self._texts(topic).items():
            try:
                values[i] = convert(decoded(text))
            except (PeerError, *MALFORMED):
                log_once(
                    f"a malformed entry {topic!r} of the host channel is ignored; see SECURITY.md",
                    logging.WARNING,
                )
        return values

    def _texts(self, topic: str) -> dict[int, str]:
        texts = {}
        for key, text in self._client.key_value_dir_get(f"{_PREFIX}/{topic}/"):
            name = key.rpartition("/")[2]
            if name in self._names:
                texts[int(name)] = text
            else:
                log_once(
                    "the host channel has entries that no process of this run wrote; they are "
                    "ignored; see SECURITY.md",
                    logging.WARNING,
                )
        return texts

    def agree(
        self,
        what: str,
        fix: str,
        value: Any = None,
        reduce: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Waits until all processes are about to do the same thing.

        Every process writes one entry and reads one verdict; process 0 reads the entries. A long
        value is only written if the others have a different one.

        Args:
            what: The action, in the same words in all processes: `"fit of model 'a'"`.
            fix: The fix for the error if the actions differ.
            value: Plain data for the others.
            reduce: Combines the values of all processes to plain data, in process 0. Without it,
                all processes get the different values.

        Returns:
            The values of all processes, in their order; or the result of `reduce`.

        Raises:
            PeerError: On every process, if one does something else, has ended, does not come, or
                `reduce` cannot combine its value.
        """
        self._calls += 1
        agreement = _Agreement(self, self._calls, what, fix, reduce)
        return agreement.as_reader(value) if self._process_id else agreement.as_writer(value)

    def awaited(self, topic: str, number: int, timeout_s: float) -> str | None:
        """The text that a process wrote, or will write within some time; else `None`.

        Args:
            topic: A name.
            number: The process.
            timeout_s: The longest time to wait, in seconds.
        """
        key, timeout_ms = f"{_PREFIX}/{topic}/{number}", max(1, round(1000 * timeout_s))
        try:
            return self._client.blocking_key_value_get(key, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def forget(self, topic: str) -> None:
        """Deletes the entries of all processes.

        Args:
            topic: A name.
        """
        self._client.key_value_delete(f"{_PREFIX}/{topic}")

    @property
    def process_id(self) -> int:
        """This process."""
        return self._process_id

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self._num_processes


class _Agreement:
    """One agreement: process 0, the writer, sends the others its verdict."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        what: str,
        fix: str,
        reduce: Callable[[list[Any]], Any] | None,
    ):
        self._channel, self._number = channel, number
        self._what, self._fix, self._reduce = what, fix, reduce
        self._wait = _Wait(channel)

    def as_reader(self, value: Any) -> Any:
        """The part of a process that reads the verdict."""
        self._enter(value)
        try:
            kind, content = self._verdict("verdict")
            if kind == _SEND:
                self._channel.write(self._topic("values"), [value])
                kind, content = self._verdict("last")
            if kind == _INVALID:
                if isinstance(content, str):
                    raise PeerError(content)
                failed, received = content
                raise _error(failed, received, self._fix)
            if self._reduce is not None:
                return content
            if kind == _SAME:
                return [value] * self._channel.num_processes
            values, which = content
            return [values[i] for i in which]
        except MALFORMED as error:
            raise malformed(self._topic("verdict"), f"{error!r:.80}") from error

    def as_writer(self, value: Any) -> Any:
        """The part of process 0."""
        self._enter(value)
        try:
            kind, every = self._values(value)
            if self._reduce is not None:
                result = content = self._reduce(every)
            else:
                result, content = every, None if kind == _SAME else _compact(every)
        except _Disagreement as difference:
            self._write_failure([difference.failed, difference.received])
            raise _error(difference.failed, difference.received, self._fix) from None
        except PeerError as error:
            self._write_failure(str(error))
            raise
        except MALFORMED as error:
            wrong = malformed(self._topic("entries"), f"{error!r:.80}")
            self._write_failure(str(wrong))
            raise wrong from error
        topic = self._topic("last" if kind == _SEND else "verdict")
        self._channel.write(topic, [kind, content])
        return result

    def _write_failure(self, content: Any) -> None:
        for topic in ("verdict", "last"):
            self._channel.write(self._topic(topic), [_INVALID, content])

    def _topic(self, name: str) -> str:
        return f"agree/{self._number}/{name}"

    def _enter(self, value: Any) -> None:
        text = encoded(value)
        mark = hashlib.sha256(text.encode()).hexdigest()
        given = [value] if len(text) <= _SHORT else None
        self._channel.write(self._topic("entries"), [self._what, mark, given])

    def _verdict(self, kind: str) -> list[Any]:
        topic = self._topic(kind)
        while True:
            text = self._channel.awaited(topic, 0, self._wait.seconds)
            if text is not None:
                return decoded(text, where=topic)
            why = self._wait.reason([0])
            if why is not None:
                raise _error(*self._hopeless({}, [0], why), self._fix)

    def _values(self, value: Any) -> tuple[str, list[Any]]:
        """The kind of verdict, and the values of all processes."""
        channel, number = self._channel, self._channel.num_processes
        entries = self._gathered(self._topic("entries"))
        if self._number > 1:
            # All processes have come here, so all have read the previous verdict.
            channel.forget(f"agree/{self._number - 1}")
        plans = {i: entry[0] for i, entry in entries.items()}
        if len(set(plans.values())) > 1:
            raise _Disagreement(failed=False, received=_by_process(plans))
        if len({entry[1] for entry in entries.values()}) == 1:
            kind, every = _SAME, [value] * number
        elif all(entry[2] for entry in entries.values()):
            kind, every = _GIVEN, [entries[i][2][0] for i in range(number)]
        else:
            channel.write(self._topic("verdict"), [_SEND, None])
            channel.write(self._topic("values"), [value])
            values = self._gathered(self._topic("values"))
            kind, every = _SEND, [values[i][0] for i in range(number)]
        return kind, every

    def _gathered(self, topic: str) -> dict[int, Any]:
        """The entries of all processes, once they are there: two requests, and one for every late
        one."""
        here = self._channel.read(topic)
        missing = self._missing(here)
        while missing:
            text = self._channel.awaited(topic, missing[0], self._wait.seconds)
            if text is not None:
                here[missing[0]] = decoded(text, where=f"{topic}/{missing[0]}")
                missing = missing[1:]
                continue
            here = self._channel.read(topic)
            missing = self._missing(here)
            why = self._wait.reason(missing) if missing else None
            if why is not None:
                raise _Disagreement(*self._hopeless(here, missing, why))
        return here

    def _missing(self, here: dict[int, Any]) -> list[int]:
        return [i for i in range(self._channel.num_processes) if i not in here]

    def _hopeless(self, here: dict[int, Any], missing: list[int], why: Absence) -> tuple[bool, str]:
        """Whether a process failed, and what all processes do, in words."""
        mine = {self._channel.process_id: self._what}
        plans = {**mine, **{i: entry[0] for i, entry in here.items() if len(entry) == 3}}
        plans.update(dict.fromkeys(missing, why.words))
        return why.kind == FAILED, _by_process(plans)


class _Disagreement(Exception):
    """Process 0 found that the processes do not do the same."""

    def __init__(self, failed: bool, received: str):
        super().__init__(failed, received)
        self.failed, self.received = failed, received


def _compact(every: list[Any]) -> list[list]:
    """The different values, once, and for every process the index of its own."""
    texts = [encoded(value) for value in every]
    places = {text: n for n, text in enumerate(dict.fromkeys(texts))}
    values = {places[text]: value for text, value in zip(texts, every, strict=True)}
    return [[values[n] for n in range(len(places))], [places[text] for text in texts]]


class _Wait:
    """How long to wait for others, and the reason to stop waiting."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._began = time.monotonic()
        self._asked: list[int] = []
        self._why: Absence | None = None
        longer_s = channel.num_processes / _PROCESSES_PER_SECOND
        self.seconds = max(_FIRST_WAIT_S, longer_s)
        self._longest_s = max(_LONGEST_WAIT_S, longer_s)

    def reason(self, missing: list[int]) -> Absence | None:
        """The reason why processes that are still missing will not come, or `None`."""
        # The reason was computed before the last look, so that no missing process can have come and
        # ended between the two.
        if self._why is not None and missing == self._asked:
            return self._why
        waited_s = time.monotonic() - self._began
        self._asked, self._why = missing, self._channel.why_not(missing, waited_s)
        self.seconds = min(2 * self.seconds, self._longest_s)
        return None


def _error(failed: bool, received: str, fix: str) -> PeerError:
    """The error for a process."""
    if failed:
        rule = "If one process fails, the others end, too, because they would wait for it."
        return PeerError(
            message(
                rule,
                received=received,
                fix="Fix the error in that process; its own output has the traceback.",
            )
        )
    rule = "All processes must make the same calls in the same order."
    return PeerError(message(rule, received=received, fix=fix))


def _by_process(plans: dict[int, str]) -> str:
    """Every process with its plan; if many have the same plan, some of them."""
    seen: Counter[str] = Counter()
    named = []
    for i, plan in sorted(plans.items()):
        seen[plan] += 1
        if seen[plan] <= _MOST_NAMED:
            named.append(f"process {i}: {plan}")
    more = [f"{n - _MOST_NAMED} more: {plan}" for plan, n in seen.items() if n > _MOST_NAMED]
    return "; ".join([*named, *more]) + "."


_open: Channel | None = None
# Opens the channel on first use: `start.watch_peers`, which imports this module.
_opener: Callable[[], None] = lambda: None  # noqa: E731


def opened(channel: Channel | None) -> None:
    """Sets this process's channel.

    Args:
        channel: The channel, or `None` to have none.
    """
    global _open
    _open = channel


def opened_by(opener: Callable[[], None]) -> None:
    """Sets the function that opens the channel on first use.

    Args:
        opener: Called without arguments.
    """
    global _opener
    _opener = opener


def is_open() -> bool:
    """Whether this process has a channel."""
    return _open is not None


def agree(
    what: str,
    fix: str,
    value: Any = None,
    reduce: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Waits for all processes; with one process it returns at once. See `Channel.agree`."""
    if _open is None:
        _opener()
    if _open is not None:
        return _open.agree(what, fix, value, reduce)
    return [value] if reduce is None else reduce([value])
