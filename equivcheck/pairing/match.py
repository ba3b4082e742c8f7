"""Which value of one file is which of the other: by quantisation, shape and place, and never by position.

Two bundles (`bundles`) may be the same value where their scale and zero point are equal (int8 and uint8 codes of the same
grid count as equal), their shapes are after moving whole axes, and the same work lies between them and what is paired before
them. Of several, the one with the same weights is taken, then the nearest, then the one whose readers are alike; where that
leaves more than one, the others are `rivals`, and numbers decide (`confirm`). For what is left less must do (`_LEVELS`): a tool
may quantise a value otherwise, or write another operator for it (a table for a Sigmoid).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from equivcheck.models.graph import Graph, Quantisation
from equivcheck.pairing.bundles import Bundle, Bundles, fixed_shape
from equivcheck.pairing.order import Order, Shape, layouts

_Token = tuple[str, int]
REORDERED = "the same numbers in another order"
_FAR = 8  # values of the other file between two that are paired without the same work


@dataclass(frozen=True)
class _Past:
    """What lies behind a bundle: the nearest paired bundles and graph inputs, the work from there on, and how many unpaired
    bundles lie between.
    """

    before: frozenset[_Token]
    work: Counter[str]
    skipped: int


@dataclass(frozen=True)
class _Level:
    """What two values must have in common. `weak`: so little that numbers must confirm it."""

    same_grid: bool = True
    same_work: bool = True
    same_weights: bool = False
    weak: bool = False


_LEVELS = (
    _Level(),
    _Level(same_grid=False, same_weights=True),
    _Level(same_work=False, weak=True),
    _Level(same_grid=False, weak=True),
)


@dataclass(frozen=True, eq=False)
class Match:
    """A stored value of the model and the value of the other file that holds its numbers, once `order` is applied to them.

    `derived`: the other file has no such value of its own; it is what the model's own reordering makes of `theirs`.
    `rivals` are other values of that file that fit as well, and `layouts` other orders that do. `same_grid`: int8 and uint8
    codes of one grid count as equal. `weak`: its numbers must confirm it.
    """

    own: str
    theirs: str
    order: Order
    derived: bool = False
    rivals: tuple[str, ...] = ()
    layouts: tuple[Order, ...] = ()
    same_grid: bool = True
    weak: bool = False


@dataclass(frozen=True, eq=False)
class Port:
    """An input of the model and the input of the other file that takes it; `order` is from the model's to the file's.

    `doubt`: what neither names nor what reads them say, so that the first that fits was taken; empty where nothing is.
    """

    own: str
    theirs: str
    order: Order
    doubt: str = ""


@dataclass(frozen=True, eq=False)
class Pairing:
    """The values that two graphs have in common. `unmatched` and `unmatched_theirs` give the reason by name."""

    own: Bundles
    other: Bundles
    ports: tuple[Port, ...]
    matches: Mapping[str, Match]
    unmatched: Mapping[str, str]
    unmatched_theirs: Mapping[str, str]
    bundles: Mapping[int, int] = field(default_factory=dict)

    @property
    def open(self) -> list[Match]:
        """The matches that only numbers can decide."""
        return [match for match in self.matches.values() if match.rivals or match.layouts]


def pair(
    own: Graph,
    other: Graph,
    *,
    decided: Mapping[str, str] | None = None,
    turned: Mapping[str, Order] | None = None,
    refused: Collection[str] = (),
) -> Pairing:
    """Pair the stored values of `own` with those of `other`. Pure.

    `decided` (value of `own` -> value of `other`) and `turned` (value of `own` -> its order) are what numbers have shown;
    values of `refused` are not paired weakly, because numbers spoke against it.
    """
    return _Matcher(Bundles(own), Bundles(other), decided or {}, turned or {}, refused).pairing()


class _Matcher:
    def __init__(
        self,
        own: Bundles,
        other: Bundles,
        decided: Mapping[str, str],
        turned: Mapping[str, Order],
        refused: Collection[str],
    ) -> None:
        self.own, self.other = own, other
        self.decided, self.turned, self.refused = decided, turned, refused
        self.levels: dict[int, _Level] = {}
        self.alike: dict[Shape | None, list[Bundle]] = defaultdict(list)
        for bundle in other.found:
            self.alike[bundle.sizes].append(bundle)
        self.theirs: dict[int, int] = {}
        self.ours: dict[int, int] = {}
        self.rivals: dict[int, tuple[int, ...]] = {}
        self.layouts: dict[int, tuple[Order, ...]] = {}
        self.inputs_alike: dict[int, int] = {}  # input -> how many of the other file's it could be
        self.ports = self._ports()

    def pairing(self) -> Pairing:
        level = 0
        while level < len(_LEVELS):
            left = [bundle for bundle in self.own.found if bundle.index not in self.theirs]
            if level == 0:
                for bundle in left:
                    self._pair(bundle, _LEVELS[0])
                level = 1
            else:  # one at a time: what is paired now lets more be paired behind it, by more
                level = 0 if any(self._pair(bundle, _LEVELS[level]) for bundle in left) else level + 1
        orders: dict[int, Order] = {}
        for k in sorted(self.theirs):
            orders[k] = self._layout(self.own.found[k], self.other.found[self.theirs[k]], orders)
        matches = {m.own: m for k, order in orders.items() for m in self._members(k, order)}
        used = {match.theirs for match in matches.values()}
        return Pairing(
            own=self.own,
            other=self.other,
            ports=tuple(self._port(a, b, orders) for a, b in self.ports),
            matches={name: matches[name] for name in self.own.graph.stored if name in matches},
            unmatched={n: self._why(b) for b in self.own.found for n in b.members if n not in matches},
            unmatched_theirs={n: self._their_why(b, n) for b in self.other.found for n in b.members if n not in used},
            bundles=dict(self.theirs),
        )

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _ports(self) -> list[tuple[Bundle, Bundle]]:
        """Graph inputs: of the same shape, and of those the same name, the same readers, the same dtype."""
        found: list[tuple[Bundle, Bundle]] = []
        left = [self.other.of[name] for name in self.other.graph.inputs]
        for name in self.own.graph.inputs:
            bundle = self.own.of[name]
            fitting = sorted((b for b in left if _fits(bundle, b)), key=lambda b: self._strange(bundle, b))
            if fitting:
                left.remove(fitting[0])
                found.append((bundle, fitting[0]))
                best = self._strange(bundle, fitting[0])
                self.inputs_alike[bundle.index] = sum(self._strange(bundle, b) == best for b in fitting)
        return found

    def _strange(self, own: Bundle, other: Bundle) -> tuple[bool, ...]:
        """In what an input of the other file differs from one of the model."""
        alike = self._readers(self.own, own) == self._readers(self.other, other)
        return own.first != other.first, not alike, own.dtype != other.dtype, own.grid != other.grid

    def _port(self, own: Bundle, other: Bundle, orders: dict[int, Order]) -> Port:
        """From the model's input to the file's: as their images lie, or as what they were paired with does."""
        known = orders.get(own.index) if self.theirs.get(own.index) == other.index else None
        known = known or self._by_image(own, other)
        doubts = ["there are other inputs like it: the first was taken"] if self.inputs_alike[own.index] > 1 else []
        choices = self._choices(own, other)
        if len(choices) > 1 and self._by_image(own, other) is None:
            doubts.append("its axes could be others: what reads it does not say")
        return Port(own.first, other.first, (known or choices[0]).reverse(), "; ".join(doubts))

    # -- one bundle ----------------------------------------------------------------------------------------------------

    def _pair(self, bundle: Bundle, level: _Level) -> bool:
        found = self._candidates(bundle, level)
        if not found:
            return False
        best = found[0][0]
        equal = [other.index for score, other in found if score == best or level.weak]
        given = self.decided.get(bundle.first)
        chosen = self.other.of[given].index if given is not None and self.other.of[given].index in equal else equal[0]
        self.theirs[bundle.index], self.ours[chosen] = chosen, bundle.index
        self.levels[bundle.index] = level
        if len(equal) > 1 and given is None:
            self.rivals[bundle.index] = tuple(k for k in equal if k != chosen)
        return True

    def _candidates(self, bundle: Bundle, level: _Level) -> list[tuple[tuple[int, ...], Bundle]]:
        """What `bundle` may be, the best first, with how good it is (less is better)."""
        if bundle.sizes is None or (level.weak and (bundle.quantisation is None or bundle.first in self.refused)):
            return []
        past = self._past(self.own, bundle, self._own_token)
        if past is None or (level.weak and past.skipped):
            return []
        weights, found = self.own.weights(bundle), []
        for other in self.alike[bundle.sizes]:
            if other.index in self.ours or (bundle.grid == other.grid) != level.same_grid:
                continue
            theirs = self._past(self.other, other, self._their_token, past.work if level.same_work else None)
            if theirs is None or theirs.before != past.before or (level.same_work and theirs.work != past.work):
                continue
            if not level.same_grid and self.own.work(bundle) != self.other.work(other):
                continue
            their_weights = self.other.weights(other)
            same_weights = bool(weights and their_weights and weights.fingerprint == their_weights.fingerprint)
            if level.same_weights and not same_weights:
                continue
            alike = self._readers(self.own, bundle) == self._readers(self.other, other)
            slots = self.own.slot(bundle) != self.other.slot(other)
            found.append(((not same_weights, theirs.skipped, not alike, int(slots)), other))
        return sorted(found, key=lambda entry: entry[0])

    def _past(
        self,
        side: Bundles,
        bundle: Bundle,
        token: Callable[[Bundle], _Token | None],
        most: Counter[str] | None = None,
    ) -> _Past | None:
        """What lies behind `bundle`. None where that is more work than `most`, or, with less than that known, far away."""
        before: set[_Token] = set()
        work, seen = side.work(bundle), {bundle.index}
        pending = [bundle]
        while pending:
            current = pending.pop()
            if not side.sources[current.index]:
                before.update(self._port_token(side, current))
            for source in side.sources[current.index]:
                known = token(source)
                if known is not None:
                    before.add(known)
                elif source.index not in seen:
                    seen.add(source.index)
                    pending.append(source)
                    work += side.work(source)
                    if side is self.other and (len(seen) > 1 + _FAR if most is None else not work <= most):
                        return None
        return _Past(frozenset(before), work, len(seen) - 1)

    def _own_token(self, bundle: Bundle) -> _Token | None:
        return ("pair", bundle.index) if bundle.index in self.theirs else None

    def _their_token(self, bundle: Bundle) -> _Token | None:
        return ("pair", self.ours[bundle.index]) if bundle.index in self.ours else None

    def _port_token(self, side: Bundles, bundle: Bundle) -> list[_Token]:
        mine = 0 if side is self.own else 1
        return [("input", k) for k, port in enumerate(self.ports) if port[mine] is bundle]

    def _readers(self, side: Bundles, bundle: Bundle) -> Counter[tuple[object, ...]]:
        """What is made of it next, past what tools fold away."""
        found: Counter[tuple[object, ...]] = Counter()
        for reader in side.readers[bundle.index]:
            work, weights = side.work(reader), side.weights(reader)
            if work:
                found[(*sorted(work.items()), reader.grid, weights and weights.fingerprint)] += 1
            else:
                found += self._readers(side, reader)
        return found

    # -- how it lies ---------------------------------------------------------------------------------------------------

    def _layout(self, own: Bundle, other: Bundle, known: Mapping[int, Order]) -> Order:
        """From the first member of `other` to that of `own`: as images lie; else as shapes allow, like its sources first."""
        given = self.turned.get(own.first)
        if given is not None:
            return given
        exact = self._by_image(own, other)
        if exact is not None:
            return exact
        choices = self._choices(own, other)
        like = [known[s.index] for s in self.own.sources[own.index] if s.index in known]
        choices.sort(key=lambda order: order not in like)
        if len(choices) > 1:
            self.layouts[own.index] = tuple(choices[1:])
        return choices[0]

    def _by_image(self, own: Bundle, other: Bundle) -> Order | None:
        """Both lie as one and the same operator makes or reads them: that is NCHW in either file."""
        mine, theirs = self.own.made_as(own), self.other.made_as(other)
        if mine is None or theirs is None:
            read = {bundle.index: order for bundle, order in self.other.read_as(other)}
            both = ((order, read.get(self.theirs.get(bundle.index, -1))) for bundle, order in self.own.read_as(own))
            mine, theirs = next((pair for pair in both if pair[1] is not None), (None, None))
        if mine is None or theirs is None:
            return None
        try:
            found = theirs.then(mine.reverse()).plain(other.shape or ())
            return found if found.apply(np.empty(other.shape or (), np.bool_)).shape == own.shape else None
        except ValueError:  # a reshape of an image of another size (padded on one side only): the shapes decide
            return None

    @staticmethod
    def _choices(own: Bundle, other: Bundle) -> list[Order]:
        return layouts(other.shape or (), own.shape or ())

    # -- members -------------------------------------------------------------------------------------------------------

    def _members(self, index: int, layout: Order) -> list[Match]:
        """Every member of a bundle, each from the other's member that lies most like it; derived where that is taken."""
        own, other = self.own.found[index], self.other.found[self.theirs[index]]
        found: list[Match] = []
        taken: set[str] = set()
        for name in own.members:
            ways = {mate: self._order(other, mate, layout.then(own.orders[name])) for mate in other.members}
            mate = min(ways, key=lambda m: (*self._unlike(name, m), ways[m].turns, m in taken))
            found.append(
                Match(
                    own=name,
                    theirs=mate,
                    order=ways[mate],
                    derived=mate in taken,
                    rivals=tuple(self.other.found[k].first for k in self.rivals.get(index, ())) if not found else (),
                    layouts=self.layouts.get(index, ()) if not found else (),
                    same_grid=own.grid == other.grid,
                    weak=self.levels[index].weak,
                )
            )
            taken.add(mate)
        return found

    def _unlike(self, own: str, other: str) -> tuple[bool, bool, bool]:
        """Whether one is an input and the other none, whether their axes differ, and whether their dtypes do."""
        mine, theirs = (g.values[n].dtype for g, n in ((self.own.graph, own), (self.other.graph, other)))
        fed = own in self.own.graph.inputs and other not in self.other.graph.inputs
        return fed, _axes(self.own.graph, own) != _axes(self.other.graph, other), mine != theirs

    def _order(self, other: Bundle, mate: str, beyond: Order) -> Order:
        """From a member of `other` to its first, and on."""
        return other.orders[mate].reverse().then(beyond).plain(fixed_shape(self.other.graph, mate) or ())

    # -- reasons -------------------------------------------------------------------------------------------------------

    def _why(self, bundle: Bundle) -> str:
        if bundle.shape is None:
            return "its shape is not known in the model"
        alike = [b for b in self.other.found if b.grid == bundle.grid and _fits(bundle, b)]
        if not alike:
            return f"the candidate model has no value {_grid_words(bundle.quantisation)} of its shape"
        return "the candidate model has no such value at this place"

    def _their_why(self, bundle: Bundle, name: str) -> str:
        if name != bundle.first:
            return REORDERED
        step = bundle.step
        return "an input" if step is None else f"made by {self.other.graph.main_node(step).label}"


def foreign(own: Graph, other: Graph) -> bool:
    """Whether `other` names its values otherwise: other inputs, or fewer than half of the model's values by name."""
    names = set(other.stored)
    common = sum(name in names for name in own.stored)
    return set(own.inputs) != set(other.inputs) or 2 * common < len(own.stored)


def _axes(graph: Graph, name: str) -> list[int]:
    """The sizes of a value's axes, in no order."""
    return sorted(fixed_shape(graph, name) or ())


def _fits(own: Bundle, other: Bundle) -> bool:
    """Whether axes can be moved so that the shapes are equal."""
    return own.sizes is not None and own.sizes == other.sizes


def _grid_words(quantisation: Quantisation | None) -> str:
    if quantisation is None:
        return "without quantisation"
    scale, zero = quantisation.scale.ravel(), quantisation.zero_point.ravel()
    return f"with scale {float(scale[0]):.6g} and zero point {int(zero[0])}" + (" ..." if scale.size > 1 else "")
