"""The bookkeeping of a paged KV cache: who owns which page. Plain Python, no tensors.

``PagePool`` reference-counts pages; ``Ledger`` keeps the sequences. A change has two phases:

    change = ledger.plan_extend([0, 1], [5, 5])     checks everything, changes nothing; raises CacheError
    ...                                             the cache performs ``change.actions``, in order
    ledger.commit(change)                           cannot fail

so a change that is refused, or whose copies fail, has no effect.

A sequence of ``n`` tokens keeps its first ``n - n % window`` tokens in pages and its newest tokens in a ring buffer of
``ring = window + slack`` slots, token ``i`` in slot ``i % ring``. The newest ``slack`` tokens can therefore always be
cropped exactly, even if a window was packed meanwhile.

Sequences share only pages that hold tokens of both. Partially filled pages are copy-on-write: the first owner to write
takes a copy, the last one left writes in place.
"""

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from anybit.errors import AnyBitError, LayerError
from anybit.kernels.attention.kv_page import PAGES
from anybit.scheme import is_whole

MOST = 2**31 - 1
"""The largest size of a cache: kernels index tokens and pages in int32."""


class CacheError(AnyBitError, ValueError):
    """A KV cache that is full, or a request for something it does not hold."""


@dataclass(frozen=True)
class Copy:
    """Copy pages, or rings of sequences: in all layers and heads, ``sources[i]`` to ``targets[i]``.

    Every source must be read before any target is written.
    """

    of: Literal["pages", "rings"]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Unpack:
    """Dequantize tokens begin .. end - 1 of a sequence from its pages back into its ring."""

    sequence: int
    begin: int
    end: int
    pages: tuple[int, ...]


Action = Copy | Unpack


class Entry(NamedTuple):
    """One sequence: its length in tokens, its pages, and the oldest token that its ring still holds."""

    length: int = 0
    pages: tuple[int, ...] = ()
    oldest: int = 0


@dataclass(frozen=True)
class Change:
    """A planned change: the new entries, the copies to perform first, and how many pages are taken from the pool."""

    entries: dict[int, Entry]
    actions: tuple[Action, ...] = ()
    taken: int = 0


class Independent:
    """Its copies share nothing with it: ``copy.copy`` is ``copy.deepcopy``."""

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


class PagePool(Independent):
    """A fixed number of pages with reference counts."""

    def __init__(self, pages: int) -> None:
        self.references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def next(self, count: int) -> list[int]:
        """Peek at the ``count`` pages that ``exchange`` will take next."""
        return self._free[-1 : -count - 1 : -1]

    def grow(self, pages: int) -> None:
        """Enlarge the pool to ``pages`` pages in all."""
        self._free[:0] = range(pages - 1, len(self.references) - 1, -1)
        self.references += [0] * (pages - len(self.references))

    def exchange(self, taken: int, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Take the next ``taken`` pages; add a reference to gained pages, and drop one of lost pages.

        Pages without references become free.
        """
        if taken:
            del self._free[-taken:]
        for page in gained:
            self.references[page] += 1
        for page in lost:
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)


class Ledger(Independent):
    """The sequences of a cache: their lengths and pages.

    window: tokens that are packed at a time.  page: tokens per page; one must divide the other.
    Methods raise CacheError for an impossible request, and then change nothing.
    """

    def __init__(self, sequences: int, pages: int, window: int, page: int, slack: int, capacity: int) -> None:
        if window % page and page % window:
            raise CacheError(f"the residual window ({window}) and the page ({page}) must divide one another")
        if slack < 0 or (window + slack) % 16:
            raise CacheError(f"window + slack must be a multiple of 16, not {window} + {slack}")
        self.pool = PagePool(pages)
        self.window, self.page, self.slack, self.capacity = window, page, slack, capacity
        self.ring = window + slack
        self.entries: list[Entry | None] = [None] * sequences

    def entry(self, sequence: int) -> Entry:
        """The entry of a live sequence."""
        sequence = whole(sequence, "a sequence")
        found = self.entries[sequence] if 0 <= sequence < len(self.entries) else None
        if found is None:
            raise CacheError(f"sequence {sequence} is not in the cache: it was not added, or is free again")
        return found

    def packed(self, length: int) -> int:
        """How many of ``length`` tokens are in pages."""
        return length - length % self.window

    def holding(self, length: int) -> int:
        """How many pages a sequence of ``length`` tokens fills, wholly or partly."""
        return -(-self.packed(length) // self.page)

    def add(self) -> int:
        """A new, empty sequence."""
        for sequence, entry in enumerate(self.entries):
            if entry is None:
                self.entries[sequence] = Entry()
                return sequence
        raise CacheError(
            f"all {len(self.entries)} sequences of the KV cache are in use: free one, or make room for more"
        )

    def free(self, sequence: int) -> None:
        """Remove a sequence; pages that no other sequence uses become free."""
        self.pool.exchange(0, (), self.entry(sequence).pages)
        self.entries[sequence] = None

    def plan_extend(self, sequences: Sequence[int], tokens: Sequence[int]) -> Change:
        """Append ``tokens[i]`` tokens to each sequence: allocate pages and update lengths."""
        held = self._entries(sequences)
        more = [whole(n, "a number of tokens") for n in tokens]
        if len(more) != len(held):
            raise CacheError(f"{len(held)} sequences and {len(more)} numbers of tokens: give one number for each")
        left: Counter[int] = Counter()  # how many of these sequences give up their share of a page
        copied: set[int] = set()
        needed = 0
        for (sequence, entry), n in zip(held.items(), more, strict=True):
            if n < 0 or entry.length + n > self.capacity:
                raise CacheError(
                    f"sequence {sequence} has {entry.length} tokens of at most {self.capacity}: {_short(n)} more do "
                    "not fit"
                )
            begin, end = self.packed(entry.length), self.packed(entry.length + n)
            needed += self.holding(entry.length + n) - len(entry.pages)
            if end > begin and begin % self.page:  # writes to a partial page
                page = entry.pages[begin // self.page]
                if self.pool.references[page] - left[page] > 1:
                    left[page] += 1
                    copied.add(sequence)
        needed += len(copied)
        if needed > self.pool.available:
            raise CacheError(
                f"{len(held)} sequences need {needed} more pages for their tokens, and the KV cache has "
                f"{self.pool.available} of {len(self.pool.references)} left: free a sequence, or make the cache with "
                "more pages"
            )
        fresh = iter(self.pool.next(needed))
        entries: dict[int, Entry] = {}
        copies: list[tuple[int, int]] = []
        for (sequence, (length, pages, oldest)), n in zip(held.items(), more, strict=True):
            total = length + n
            if sequence in copied:
                tail = self.packed(length) // self.page
                copies.append((pages[tail], next(fresh)))
                pages = (*pages[:tail], copies[-1][1], *pages[tail + 1 :])
            if extra := self.holding(total) - len(pages):
                pages = (*pages, *itertools.islice(fresh, extra))
            entries[sequence] = Entry(total, pages, max(oldest, total - self.ring))
        actions = (Copy("pages", *map(tuple, zip(*copies, strict=True))),) if copies else ()
        return Change(entries, actions, needed)

    def plan_crop(self, sequence: int, length: int) -> Change:
        """Keep the first ``length`` tokens; kept tokens of a reopened window move from pages back to the ring."""
        entry, length = self.entry(sequence), whole(length, "the length to crop to")
        if not 0 <= length <= entry.length:
            raise CacheError(f"sequence {sequence} has {entry.length} tokens and cannot be cropped to {_short(length)}")
        actions: tuple[Action, ...] = ()
        begin, oldest = self.packed(length), entry.oldest
        if begin < length and oldest > begin:
            end = min(length, oldest)
            pages = entry.pages[begin // self.page : -(-end // self.page)]
            actions = (Unpack(operator.index(sequence), begin, end, pages),)
            oldest = begin
        kept = Entry(length, entry.pages[: self.holding(length)], min(oldest, length))
        return Change({operator.index(sequence): kept}, actions)

    def plan_reorder(self, sequences: Sequence[int], origin: Sequence[int]) -> Change:
        """Sequence ``sequences[i]`` becomes what ``sequences[origin[i]]`` was."""
        held = list(self._entries(sequences))
        places = [whole(o, "an origin") for o in origin]
        if len(places) != len(held):
            raise CacheError(f"{len(held)} sequences cannot be reordered by {len(places)} origins: give one for each")
        for place in places:
            if not 0 <= place < len(held):
                raise CacheError(f"origin {_short(place)} is not one of the {len(held)} sequences: count them from 0")
        moved = [(held[o], s) for s, o in zip(held, places, strict=True) if held[o] != s]
        entries = {target: self.entry(source) for source, target in moved}
        rings = Copy("rings", tuple(s for s, _ in moved), tuple(t for _, t in moved))
        return Change(entries, (rings,) if moved else ())

    def commit(self, change: Change) -> None:
        """Apply a plan; no other change may have been committed since it was made."""
        gained: list[int] = []
        lost: list[int] = []
        for _, old, new, first in self.moves(change):
            gained += new[first:]
            lost += old[first:]
        for sequence, entry in change.entries.items():
            self.entries[sequence] = entry
        self.pool.exchange(change.taken, gained, lost)

    def moves(self, change: Change) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
        """For each sequence whose pages change: (sequence, old pages, new pages, length of their common prefix).

        The prefix is all old pages if pages are only appended, as in most steps, else 0.
        """
        for sequence, entry in change.entries.items():
            old = (self.entries[sequence] or Entry()).pages
            if entry.pages is not old:
                yield sequence, old, entry.pages, len(old) if entry.pages[: len(old)] == old else 0

    def _entries(self, sequences: Sequence[int]) -> dict[int, Entry]:
        """Entries by sequence; CacheError for one that does not exist or is named twice."""
        held = {whole(s, "a sequence"): self.entry(s) for s in sequences}
        if len(held) < len(sequences):
            twice, times = Counter(sequences).most_common(1)[0]
            raise CacheError(f"sequence {twice} is named {times} times: name each sequence once")
        return held


def whole(value: object, name: str) -> int:
    """``value`` as an int; CacheError for 1.5, 1.0, True and everything else that is not an integer."""
    if type(value) is int:
        return value
    try:
        if is_whole(value):
            return operator.index(value)
    except TypeError:
        pass  # such as a float tensor
    raise CacheError(f"{name} must be a whole number, not {value!r}")


def _short(number: int) -> str:
    """A number for messages, shortened if it has too many digits."""
    return str(number) if abs(number) < 10**18 else f"{'-' if number < 0 else ''}more than 10^18"


def check_size(name: str, size: object) -> None:
    """Raise LayerError unless a size is an integer from 1 to MOST."""
    if not is_whole(size) or not 1 <= size <= MOST:
        raise LayerError(f"{name} of a KV cache must be a whole number from 1 to 2^31 - 1, not {size!r}")


def check_page(page: object, slack: object) -> None:
    """Raise LayerError for an unsupported page size or slack, both in tokens."""
    if not is_whole(page) or page not in PAGES:
        raise LayerError(f"a page holds 64, 128 or 256 tokens, not {page!r}")
    if not is_whole(slack) or slack % 32 or not 0 <= slack <= MOST:
        raise LayerError(f"slack must be a multiple of 32 tokens, 0 or more, not {slack!r}")
