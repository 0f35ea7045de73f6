"""The host channel: messages between processes through JAX's coordinator, beside the devices.

A collective that not every process launches cannot be interrupted. So before the host starts one
(a fit, reading a weight that is split over hosts, saving), all processes write here what they are
about to do, and all raise if it is not the same.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from keras_tpu_dist.common.errors import message
from keras_tpu_dist.common.once import log_once
from keras_tpu_dist.processes.encoding import ANYTHING, check_form, decoded, encoded
from keras_tpu_dist.processes.encoding import PeerError as PeerError

_PREFIX = "keras_tpu_dist"
# Every poll is a request to the coordinator, so the waits between polls grow.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.05


class Channel:
    """This process's end of the channel.

    Args:
        client: JAX's client of the coordination service.
        process_id: This process.
        num_processes: How many there are.
        why_not: From the processes that are waited for, and the seconds so far, to the reason to
            wait no longer, or `None`.
    """

    def __init__(
        self,
        client: Any,
        process_id: int,
        num_processes: int,
        why_not: Callable[[list[int], float], str | None] = lambda missing, waited_s: None,
    ):
        self._client = client
        self._process_id = process_id
        self._num_processes = num_processes
        self._names = {str(number) for number in range(num_processes)}
        self.why_not = why_not
        self._calls = 0

    def write(self, topic: str, value: Any) -> None:
        """Writes what all processes can read.

        Args:
            topic: A name; what this process wrote under it before is replaced.
            value: Plain data, for JSON.
        """
        key = f"{_PREFIX}/{topic}/{self._process_id}"
        self._client.key_value_set(key, encoded(value), allow_overwrite=True)

    def read(self, topic: str, form: Any = ANYTHING) -> dict[int, Any]:
        """What every process wrote, by its number; without those that have not.

        Args:
            topic: A name.
            form: The form of what they write. See `encoding.decoded`.

        Raises:
            PeerError: If an entry is anything else.
        """
        texts = self._texts(topic)
        return {i: decoded(text, form, where=f"{topic}/{i}") for i, text in texts.items()}

    def read_valid(self, topic: str, form: Any) -> dict[int, Any]:
        """As `read`, but what is malformed counts as not written and is logged once.

        The watch reads so: a stranger's entry must not end a run.

        Args:
            topic: A name.
            form: The form of what they write.
        """
        found = {}
        for i, text in self._texts(topic).items():
            try:
                found[i] = decoded(text, form, where=f"{topic}/{i}")
            except PeerError:
                log_once(
                    f"a malformed entry {topic!r} of the host channel is ignored; see SECURITY.md",
                    logging.WARNING,
                )
        return found

    def _texts(self, topic: str) -> dict[int, str]:
        found = {}
        for key, text in self._client.key_value_dir_get(f"{_PREFIX}/{topic}/"):
            name = key.rpartition("/")[2]
            if name in self._names:
                found[int(name)] = text
            else:
                log_once(
                    "the host channel has entries that no process of this run wrote; they are "
                    "ignored; see SECURITY.md",
                    logging.WARNING,
                )
        return found

    def agree(self, what: str, fix: str, value: Any = None, form: Any = ANYTHING) -> list[Any]:
        """Waits until all processes are about to do the same thing.

        Args:
            what: What that is, in words that are the same everywhere: `"fit of model 'a'"`.
            fix: What to write if it is not, for the error.
            value: Plain data for the others.
            form: What they give. See `encoding.decoded`.

        Returns:
            The values of all processes, in their order.

        Raises:
            PeerError: On every process, if one does something else, has ended, does not come, or
                gives something of another form.
        """
        self._calls += 1
        topic = f"agree/{self._calls}"
        self.write(topic, [what, value])
        here = self._gathered(topic, what, fix, form)
        if self._calls > 1:
            # All have come here, so all have read the entries of the call before.
            self._client.key_value_delete(f"{_PREFIX}/agree/{self._calls - 1}/{self._process_id}")
        plans = {i: plan for i, (plan, _) in here.items()}
        if len(set(plans.values())) > 1:
            raise PeerError(_mismatch(plans, fix))
        for i, (_, given) in here.items():
            check_form(given, form, where=f"{topic}/{i}")
        return [here[i][1] for i in range(self._num_processes)]

    def _gathered(self, topic: str, what: str, fix: str, form: Any) -> dict[int, Any]:
        began = time.monotonic()
        wait = _FIRST_WAIT_S
        asked, why = [], None
        while True:
            here = self.read(topic, [str, ANYTHING])
            missing = [i for i in range(self._num_processes) if i not in here]
            if not missing:
                return here
            # The reason was asked for before this read of the topic, so none of the missing
            # came and then ended between the two.
            if why is not None and missing == asked:
                plans = {i: plan for i, (plan, _) in here.items()}
                text = _failure if why.startswith("failed ") else _mismatch
                raise PeerError(text({**plans, **dict.fromkeys(missing, why)}, fix))
            asked, why = missing, self.why_not(missing, time.monotonic() - began)
            if why is None:
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)


def _mismatch(plans: dict[int, str], fix: str) -> str:
    return message(
        "All processes call what needs all of them, in the same order.",
        received=_by_process(plans),
        fix=fix,
    )


def _failure(plans: dict[int, str], fix: str) -> str:
    return message(
        "A process that fails ends the others, which wait for it.",
        received=_by_process(plans),
        fix="Mend what failed there; its own output has the traceback.",
    )


def _by_process(plans: dict[int, str]) -> str:
    return "; ".join(f"process {i}: {plan}" for i, plan in sorted(plans.items())) + "."


_open: Channel | None = None
# Opens the channel when it is first needed: `start.watch_peers`, which imports this module.
_opener: Callable[[], None] = lambda: None  # noqa: E731


def opened(channel: Channel | None) -> None:
    """Makes a channel this process's.

    Args:
        channel: The channel, or `None` to have none.
    """
    global _open
    _open = channel


def opened_by(opener: Callable[[], None]) -> None:
    """Sets what opens the channel when it is first needed.

    Args:
        opener: Called without arguments.
    """
    global _opener
    _opener = opener


def is_open() -> bool:
    """Whether this process has a channel."""
    return _open is not None


def agree(what: str, fix: str, value: Any = None, form: Any = ANYTHING) -> list[Any]:
    """Waits for all processes; with one process it returns at once. See `Channel.agree`."""
    if _open is None:
        _opener()
    return [value] if _open is None else _open.agree(what, fix, value, form)
