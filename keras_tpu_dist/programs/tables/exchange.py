"""Looks up and updates the rows of a table on the devices that own them.

Every device sorts its ids by owner, sends each owner its distinct ids, and receives their rows. The
gradients of the rows return by the same route. Programs have fixed shapes, so the number of ids
that one device sends to another has a limit: five standard deviations above the mean of random ids.
Steps that need more use rounds: a hash divides the ids into 2, 4, 8, ... rounds, until each fits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from keras_tpu_dist.common.axes import axis_size
from keras_tpu_dist.common.scopes import RARE_LOOP

# An id that no device owns.
NOBODY = np.iinfo("int32").max
# Standard deviations between the mean count of random ids and the limit.
_DEVIATIONS = 5
# Odd, so that no two rows have the same hash.
_MULTIPLIER = np.uint32(2654435769)


@dataclass(frozen=True)
class TableSplit:
    """How a table and the ids that look it up are split."""

    mesh: Mesh
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batch: tuple[str, ...]
    shape: tuple[int, int]

    @functools.cached_property
    def rows_each(self) -> int:
        """The rows of one device."""
        return self.shape[0] // axis_size(self.mesh, self.rows)

    @functools.cached_property
    def exchanged(self) -> tuple[str, ...]:
        """The axes over which ids go to the owners of their rows."""
        return tuple(name for name in self.rows if name in self.batch)

    @functools.cached_property
    def summed(self) -> tuple[str, ...]:
        """The axes whose devices have the same ids and different rows."""
        return tuple(name for name in self.rows if name not in self.batch)

    @functools.cached_property
    def traded(self) -> tuple[str, ...]:
        """The axes over which devices exchange columns of all ids for all columns of their own."""
        return tuple(name for name in self.columns if name in self.batch)

    @functools.cached_property
    def gathered(self) -> tuple[str, ...]:
        """The axes whose devices have different ids and the same rows."""
        return tuple(name for name in self.batch if name not in (*self.rows, *self.columns))

    @functools.cached_property
    def left(self) -> tuple[str, ...]:
        """The axes that split the columns of the result."""
        return tuple(name for name in self.columns if name not in self.batch)

    @property
    def ways(self) -> int:
        """The number of devices that exchange ids."""
        return axis_size(self.mesh, self.exchanged)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that take part."""
        return (*self.rows, *self.columns, *self.gathered)

    @property
    def layout(self) -> PartitionSpec:
        """The table's layout."""
        return PartitionSpec(self.rows or None, self.columns or None)

    def trouble(self) -> str:
        """Why rows cannot be exchanged, or `""`."""
        if self.columns != (*self.left, *self.traded):
            return f"its width is split over {self.columns}, and the data axes are not the last"
        if not axis_size(self.mesh, (*self.rows, *self.columns)) > 1:
            return "it is replicated"
        if self.shape[0] >= NOBODY:
            return "it has more rows than 32-bit ids can name"
        return ""


class Sorted(NamedTuple):
    """The ids of a device by owner.

    The first three fields have an entry for each id, the others one for each distinct id.
    """

    number: Any
    owner: Any
    hashed: Any
    rows: Any
    owners: Any
    hashes: Any


class Route(NamedTuple):
    """The places of a device's ids in an exchange, and the rows that others request from it.

    Attributes:
        place: For each id its place in the result; beyond the end for an id without an owner.
        own: The requested rows of this device; its number of rows in free places.
        halvings: 0 if all ids fit, `n` if they need `2**n` rounds.
        rows: The values of the requested rows, `None` without a lookup.
    """

    place: Any
    own: Any
    halvings: Any
    rows: Any = None


class Lookups:
    """One lookup of a table, or the return of its gradients.

    Args:
        split: How table and ids are split.
        count: The number of ids of one device.
    """

    def __init__(self, split: TableSplit, count: int):
        self.split = split
        # A device that exchanges columns looks up the ids of all its partners.
        self.count = count * axis_size(split.mesh, split.traded or None)
        self.capacity = self.count
        if split.exchanged:
            self.capacity = _bound(self.count, axis_size(split.mesh, split.rows))

    @property
    def places(self) -> int:
        """The number of places in an exchange."""
        return self.split.ways * self.capacity

    @property
    def may_need_rounds(self) -> bool:
        """Whether the ids may need more places than there are."""
        return self.capacity < self.count

    def ids(self, ids: Any) -> Any:
        """The ids that a device looks up, as a vector.

        Args:
            ids: Its own ids.
        """
        ids, traded = ids.ravel(), self.split.traded
        return lax.all_gather(ids, traded, tiled=True) if traded else ids

    def _owned(self, ids: Any) -> tuple[Any, Any]:
        """For each id the number of its owner, and the row on that device."""
        split, owner, rest = self.split, jnp.zeros_like(ids), ids // self.split.rows_each
        local, valid, ways = ids - rest * split.rows_each, ids < NOBODY, 1
        for name in reversed(split.rows):
            size = split.mesh.shape[name]
            if name in split.exchanged:
                owner, ways = owner + rest % size * ways, ways * size
            else:
                valid &= rest % size == lax.axis_index(name)
            rest = rest // size
        return jnp.where(valid, owner, ways), jnp.where(valid, local, split.rows_each)

    def sorted(self, ids: Any) -> Sorted:
        """Sorts the ids of a device by owner.

        Args:
            ids: The ids, a vector.
        """
        owner, local = self._owned(ids)
        hashed, places = local.astype("uint32") * _MULTIPLIER, jnp.arange(ids.size, dtype="int32")
        owner, hashed, order, local = lax.sort((owner, hashed, places, local), num_keys=2)
        first = jnp.append(True, (owner[1:] != owner[:-1]) | (hashed[1:] != hashed[:-1]))
        number = jnp.cumsum(first.astype("int32")) - 1
        first &= owner < self.split.ways
        _, rows, owners, hashes = lax.sort(
            (
                jnp.where(first, number, NOBODY),
                local,
                jnp.where(first, owner, self.split.ways),
                hashed,
            ),
            num_keys=1,
        )
        _, number, owner, hashed = lax.sort((order, number, owner, hashed), num_keys=1)
        return Sorted(number, owner, hashed, rows, owners, hashes)

    def halvings(self, ids: Sorted) -> Any:
        """The number of times that rounds must be halved until the ids of each one fit.

        Ids are sorted by owner and hash. An owner with more than `capacity` ids has two of them
        that are `capacity` apart in this order. Rounds are the first bits of the hash: those two
        fall into different rounds as soon as these are one bit more than the two hashes share.
        """
        capacity = self.capacity
        if not self.may_need_rounds:
            return jnp.zeros((), "int32")
        beyond = (ids.owners[:-capacity] == ids.owners[capacity:]) & (
            ids.owners[capacity:] < self.split.ways
        )
        equal = lax.clz(ids.hashes[:-capacity] ^ ids.hashes[capacity:]).astype("int32")
        return jnp.max(jnp.where(beyond, equal + 1, 0))

    def round(self, ids: Sorted, halvings: Any, number: Any) -> tuple[Any, Any]:
        """The rows to request from each owner in a round, and each id's place among them.

        Args:
            ids: The sorted ids of a device.
            halvings: There are `2**halvings` rounds.
            number: The number of the round.
        """
        ways, capacity = self.split.ways, self.capacity
        owners = jnp.arange(ways, dtype="int32")[:, None]
        turn = _round_of(ids.hashes, halvings)
        starts = ((ids.owners < owners) | ((ids.owners == owners) & (turn < number))).sum(1)
        counts = ((ids.owners == owners) & (turn == number)).sum(1)
        starts = starts.astype("int32")
        rows = jnp.append(ids.rows, jnp.full(capacity, self.split.rows_each, "int32"))
        parts = [lax.dynamic_slice(rows, (starts[k],), (capacity,)) for k in range(ways)]
        filled = jnp.arange(capacity) < counts[:, None]
        sent = jnp.where(filled, jnp.stack(parts), self.split.rows_each)
        start = jnp.where(ids.owner == owners, starts[:, None], 0).sum(0)
        place = ids.owner * capacity + ids.number - start
        here = (ids.owner < ways) & (_round_of(ids.hashed, halvings) == number)
        return sent, jnp.where(here, place, self.places)

    def exchange(self, array: Any) -> Any:
        """Sends each device its part of an array, and receives a part from each.

        Args:
            array: One part for each device, one after another.
        """
        axes = self.split.exchanged
        if not axes:
            return array
        shape = array.shape
        array = array.reshape(self.split.ways, self.capacity, *shape[1:])
        return lax.all_to_all(array, axes, 0, 0, tiled=True).reshape(shape)

    def route(self, ids: Any) -> Route:
        """The route of a device's ids if one round is enough.

        Args:
            ids: The ids, a vector.
        """
        if not self.split.exchanged:
            _, own = self._owned(ids)
            zero = jnp.zeros((), "int32")
            return Route(jnp.arange(ids.size, dtype="int32"), own, zero)
        by_owner = self.sorted(ids)
        sent, place = self.round(by_owner, jnp.zeros((), "int32"), 0)
        halvings = self.halvings(by_owner)
        if self.may_need_rounds:
            halvings = lax.pmax(halvings, self.split.axes)
        return Route(place, self.exchange(sent.ravel()), halvings)

    def got(self, rows: Any, place: Any) -> Any:
        """Rows for a device's ids; zeros for ids without a place.

        Args:
            rows: The values of the rows that others requested from it.
            place: The places of its own ids.
        """
        return self.exchange(rows).at[place].get(mode="fill", fill_value=0)

    def look_up(self, table: Any, ids: Any) -> tuple[Any, Route]:
        """The rows for a device's ids; zeros for ids without an owner.

        Args:
            table: The device's part of the table.
            ids: Its ids.
        """
        split, ids = self.split, self.ids(ids)
        route = self.route(ids)
        asked = rows_at(table, route.own)
        rows = self.got(asked, route.place)
        if self.may_need_rounds:
            rows = self._in_rounds(table, ids, route.halvings, rows)
        if split.summed:
            rows = lax.psum(rows, split.summed)
        if split.traded:
            rows = lax.all_to_all(rows, split.traded, 0, 1, tiled=True)
        return rows, route._replace(rows=asked)

    def _in_rounds(self, table: Any, ids: Any, halvings: Any, rows: Any) -> Any:
        # Results leave the loop as integers. Otherwise XLA moves their conversion before the loop
        # and converts the whole table, even if the loop does not run.
        bits = functools.partial(
            lax.bitcast_convert_type, new_dtype=f"uint{8 * table.dtype.itemsize}"
        )

        def body(number: Any, found: Any) -> Any:
            own, place = self.asked_in_round(ids, halvings, number)
            here = (place < self.places)[:, None]
            return jnp.where(here, self.got(bits(rows_at(table, own)), place), found)

        found = rarely(jnp.where(halvings > 0, 1 << halvings, 0), body, bits(rows))
        return lax.bitcast_convert_type(found, table.dtype)

    def asked_in_round(self, ids: Any, halvings: Any, number: Any) -> tuple[Any, Any]:
        """The rows that others request from a device in a round, and the places of its own ids.

        Args:
            ids: Its ids, a vector.
            number: The number of the round.
        """
        if not self.split.exchanged:
            route = self.route(ids)
            return route.own, route.place
        sent, place = self.round(self.sorted(ids), halvings, number)
        return self.exchange(sent.ravel()), place

    def columns(self, gradients: Any) -> Any:
        """Exchanges gradients of a device's ids for those of its columns of all ids it looks up.

        Args:
            gradients: A row for each of its ids.
        """
        traded = self.split.traded
        return lax.all_to_all(gradients, traded, 1, 0, tiled=True) if traded else gradients

    def back(self, gradients: Any, own: Any, place: Any) -> tuple[Any, Any]:
        """Sends gradients to the owners of their rows.

        Args:
            gradients: A row for each id that the device looked up.
            own: The rows that others requested from it.
            place: The places of its own ids.
        """
        if self.split.exchanged:
            gone = jnp.zeros((self.places, gradients.shape[1]), gradients.dtype)
            gradients = self.exchange(gone.at[place].add(gradients, mode="drop"))
        axes = self.split.gathered
        if axes:
            own = lax.all_gather(own, axes, tiled=True)
            gradients = lax.all_gather(gradients, axes, tiled=True)
        return own, gradients


def _round_of(hashes: Any, halvings: Any) -> Any:
    """The round of each hash: its first bits, by two shifts, since a shift by 32 is undefined."""
    return ((hashes >> 1) >> (31 - halvings).astype("uint32")).astype("int32")


def rows_at(array: Any, rows: Any) -> Any:
    """Some rows of an array; zeros for those beyond its end.

    Args:
        array: The array.
        rows: Their numbers.
    """
    return array.at[rows].get(mode="fill", fill_value=0)


def _bound(count: int, parts: int) -> int:
    """The most of `count` random ids that are in one of `parts` equal parts, with a margin."""
    mean = count / parts
    bound = mean + _DEVIATIONS * math.sqrt(mean)
    return min(count, math.ceil(bound / 32) * 32)


def rarely(times: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """A loop that rarely runs; estimates of cycles leave it out.

    Args:
        times: The number of rounds.
        body: From the number of the round and the state to the new state.
        state: The state.
    """
    with jax.named_scope(RARE_LOOP):
        return lax.fori_loop(0, times, body, state)


class Unique(NamedTuple):
    """Distinct rows, and the place of each gradient among them.

    Attributes:
        rows: The numbers of the rows; that of all rows in free places.
        group: The place of each gradient; beyond the end for one without a row.
        first: The place of the first gradient of each row.
    """

    rows: Any
    group: Any
    first: Any
    fits: Any


def unique(own: Any, rows_each: int, bound: int) -> Unique:
    """The distinct rows among the requested ones.

    Args:
        own: The rows; `rows_each` in free places.
        rows_each: The number of rows of the device.
        bound: The number of places for rows.
    """
    ordered, order = lax.sort((own, jnp.arange(own.size, dtype="int32")), num_keys=1)
    first = jnp.append(True, ordered[1:] != ordered[:-1]) & (ordered < rows_each)
    number = jnp.cumsum(first.astype("int32")) - 1
    rows, at = lax.sort((jnp.where(first, ordered, rows_each), order), num_keys=1)
    places = jnp.where(ordered < rows_each, number, bound)
    group = lax.sort((order, places), num_keys=1)[1]
    return Unique(rows[:bound], group, at[:bound], number[-1] < bound)


class Updates:
    """Updates the used rows of a table and of its optimizer's slots.

    Args:
        lookups: The lookups that have gradients.
        rows: A function from rows of the state, gradients of these rows, and scalars to the new
            rows of the state.
    """

    def __init__(self, lookups: Sequence[Lookups], rows: Callable[[list, list, list], list]):
        self._lookups, self._rows = lookups, rows
        self._split = split = lookups[0].split
        together = axis_size(split.mesh, split.gathered or None)
        self._asked = sum(lookup.places for lookup in lookups) * together
        ids = sum(lookup.count for lookup in lookups) * axis_size(
            split.mesh, split.exchanged or None
        )
        bound = _bound(ids * together, axis_size(split.mesh, split.rows or None))
        most = min(self._asked, split.rows_each)
        self._bound, self._may_overflow = min(most, bound), bound < most

    def __call__(self, state: list, ids: list, routes: list, gradients: list, numbers: list):
        """The new state of one device.

        Args:
            state: Its parts of the table and of the slots.
            ids: Its ids, for each lookup.
            routes: The `Route` of each lookup.
            gradients: The gradients of each lookup.
            numbers: Other inputs of the update, such as the learning rate.
        """
        lookups, split = self._lookups, self._split
        gradients = [lookup.columns(g) for lookup, g in zip(lookups, gradients, strict=True)]

        def found_at(places: list, bound: int) -> tuple[Unique, list]:
            """The rows of this device, and their gradients, by the places of a round."""
            given = [
                lookup.back(g, *where)
                for lookup, g, where in zip(lookups, gradients, places, strict=True)
            ]
            own = jnp.concatenate([rows for rows, _ in given])
            return unique(own, split.rows_each, bound), [g for _, g in given]

        found, sums = found_at([(route.own, route.place) for route in routes], self._bound)
        halvings = functools.reduce(jnp.maximum, [route.halvings for route in routes])
        fits = halvings == 0
        if self._may_overflow:
            fits &= lax.pmin(found.fits.astype("int32"), split.axes) > 0
        # If the rows do not fit, nothing changes here, and everything in the rounds below.
        found = found._replace(rows=jnp.where(fits, found.rows, split.rows_each))
        # The lookup has already read the table's rows.
        table = None
        if not split.gathered and all(route.rows is not None for route in routes):
            table = rows_at(jnp.concatenate([route.rows for route in routes]), found.first)
        state = self._changed(state, found, sums, numbers, table)
        if not (self._may_overflow or any(lookup.may_need_rounds for lookup in lookups)):
            return state

        def body(number: Any, state: list) -> list:
            asked = [
                lookup.asked_in_round(lookup.ids(these), halvings, number)
                for lookup, these in zip(lookups, ids, strict=True)
            ]
            return self._changed(state, *found_at(asked, self._asked), numbers, None)

        return rarely(jnp.where(fits, 0, 1 << halvings), body, state)

    def _changed(
        self, state: list, found: Unique, gradients: list, numbers: list, table: Any
    ) -> list:
        """The state with new rows.

        Args:
            numbers: Other inputs of the update.
        """
        bound = found.rows.size
        starts = np.cumsum([0, *(len(g) for g in gradients)])[:-1]
        sums = [
            jnp.zeros((bound, g.shape[1]), g.dtype)
            .at[found.group[start : start + len(g)]]
            .add(g, mode="drop")
            for start, g in zip(starts, gradients, strict=True)
        ]
        before = [rows_at(array, found.rows) for array in (state if table is None else state[1:])]
        before = before if table is None else [table, *before]
        after = self._rows(before, sums, numbers)
        return [
            array.at[found.rows].set(rows.astype(array.dtype), mode="drop")
            for array, rows in zip(state, after, strict=True)
        ]
