"""Who owns which page: the bookkeeping of a paged KV cache, in plain Python, without any tensor.

``PagePool`` counts the references of pages; ``Ledger`` keeps the sequences. Whatever a change of the ledger asks of the
memory (copy a page that two sequences would write to, bring packed tokens back into the 16-bit residual) is returned as
a list of ``Action`` for the cache to carry out in order.

A sequence of ``n`` tokens has its first ``n - n % window`` tokens in pages and its newest tokens in a ring of
``ring = window + slack`` slots, token ``i`` in slot ``i % ring``. So the newest ``slack`` tokens can always be taken
back exactly as they were, even when a window was packed in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from anybit.errors import AnyBitError


class CacheError(AnyBitError, ValueError):
    """A KV cache that is full, or asked for something it does not hold."""


@dataclass(frozen=True)
class CopyPage:
    """Copy a page, all layers and heads, before one of its owners writes to it."""

    source: int
    target: int


@dataclass(frozen=True)
class CopyRing:
    """Copy the residual of one sequence to another."""

    source: int
    target: int


@dataclass(frozen=True)
class Unpack:
    """Bring tokens begin .. end - 1 of a sequence back from pages into its ring, with the values the pages have."""

    sequence: int
    begin: int
    end: int
    pages: tuple[int, ...]


Action = CopyPage | CopyRing | Unpack


class PagePool:
    """A fixed number of pages with reference counts."""

    def __init__(self, pages: int) -> None:
        self.references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    def take(self) -> int:
        """A page of one's own. Raises CacheError when none is left."""
        if not self._free:
            raise CacheError(
                f"all {len(self.references)} pages of the KV cache are in use: free a sequence, or make the cache with "
                "more pages"
            )
        page = self._free.pop()
        self.references[page] = 1
        return page

    def grow(self, pages: int) -> None:
        """Have ``pages`` pages in all."""
        self._free[:0] = range(pages - 1, len(self.references) - 1, -1)
        self.references += [0] * (pages - len(self.references))

    def share(self, page: int) -> None:
        """One owner more."""
        self.references[page] += 1

    def drop(self, page: int) -> None:
        """One owner less; the last one frees it."""
        self.references[page] -= 1
        if self.references[page] == 0:
            self._free.append(page)
        elif self.references[page] < 0:
            raise CacheError(f"page {page} of the KV cache was freed twice")


@dataclass
class Entry:
    """One sequence: how many tokens it has, its pages, and the oldest token that its ring still holds."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    oldest: int = 0


class Ledger:
    """The sequences of a cache: who has how many tokens, and where.

    window: tokens that are packed at a time (a multiple of 16).  page: tokens of a page; one divides the other.
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
        """The state of a live sequence."""
        found = self.entries[sequence] if 0 <= sequence < len(self.entries) else None
        if found is None:
            raise CacheError(f"sequence {sequence} is not in the cache")
        return found

    def packed(self, length: int) -> int:
        """How many of ``length`` tokens are in pages."""
        return length - length % self.window

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
        """Forget a sequence; pages that nobody else has become available."""
        for page in self.entry(sequence).pages:
            self.pool.drop(page)
        self.entries[sequence] = None

    def needs(self, sequence: int, tokens: int) -> int:
        """How many new pages ``reserve`` would take."""
        entry = self.entry(sequence)
        wanted = -(-self.packed(entry.length + tokens) // self.page)
        extra = max(wanted - len(entry.pages), 0)
        return extra + (1 if self._shared_tail(entry, entry.length + tokens) is not None else 0)

    def _shared_tail(self, entry: Entry, length: int) -> int | None:
        """The index of a half-filled page that ``length`` tokens would write to and another sequence has too."""
        begin = self.packed(entry.length)
        if self.packed(length) == begin or begin % self.page == 0:
            return None
        index = begin // self.page
        shared = index < len(entry.pages) and self.pool.references[entry.pages[index]] > 1
        return index if shared else None

    def reserve(self, sequence: int, tokens: int) -> list[Action]:
        """Make sure that ``tokens`` more tokens have pages of their own. All or nothing."""
        entry = self.entry(sequence)
        if tokens < 0 or entry.length + tokens > self.capacity:
            raise CacheError(
                f"sequence {sequence} has {entry.length} tokens of at most {self.capacity}: {tokens} more do not fit"
            )
        if self.needs(sequence, tokens) > self.pool.available:
            raise CacheError(
                f"sequence {sequence} needs {self.needs(sequence, tokens)} more pages for {tokens} tokens, and the KV "
                f"cache has {self.pool.available} of {len(self.pool.references)} left: free a sequence, or add pages"
            )
        actions: list[Action] = []
        index = self._shared_tail(entry, entry.length + tokens)
        if index is not None:
            old, entry.pages[index] = entry.pages[index], self.pool.take()
            self.pool.drop(old)
            actions.append(CopyPage(old, entry.pages[index]))
        while len(entry.pages) * self.page < self.packed(entry.length + tokens):
            entry.pages.append(self.pool.take())
        return actions

    def extend(self, sequence: int, tokens: int) -> list[Action]:
        """Append ``tokens`` tokens: reserve their pages and count them."""
        actions = self.reserve(sequence, tokens)
        entry = self.entry(sequence)
        entry.length += tokens
        entry.oldest = max(entry.oldest, entry.length - self.ring)
        return actions

    def crop(self, sequence: int, length: int) -> list[Action]:
        """Keep the first ``length`` tokens; what leaves the pages but not the sequence goes back to the ring."""
        entry = self.entry(sequence)
        if not 0 <= length <= entry.length:
            raise CacheError(f"sequence {sequence} has {entry.length} tokens and cannot be cropped to {length}")
        actions: list[Action] = []
        begin = self.packed(length)
        if begin < length and entry.oldest > begin:
            end = min(length, entry.oldest)
            first, last = begin // self.page, -(-end // self.page)
            actions.append(Unpack(sequence, begin, end, tuple(entry.pages[first:last])))
            entry.oldest = begin
        entry.length = length
        entry.oldest = min(entry.oldest, length)
        keep = -(-begin // self.page)
        for page in entry.pages[keep:]:
            self.pool.drop(page)
        del entry.pages[keep:]
        return actions

    def fork(self, sequence: int) -> tuple[int, list[Action]]:
        """A second sequence with the same tokens: pages are shared, the residual is copied."""
        source = self.entry(sequence)
        target = self.add()
        for page in source.pages:
            self.pool.share(page)
        self.entries[target] = Entry(source.length, list(source.pages), source.oldest)
        return target, [CopyRing(sequence, target)]

    def reorder(self, sequences: Sequence[int], origin: Sequence[int]) -> list[tuple[int, int]]:
        """Sequence ``sequences[i]`` becomes what ``sequences[origin[i]]`` was; returns (source, target) ring copies.

        The copies are meant at once: every source is read before any target is written.
        """
        old = [self.entry(s) for s in sequences]
        new = [Entry(old[o].length, list(old[o].pages), old[o].oldest) for o in origin]
        for entry in new:
            for page in entry.pages:
                self.pool.share(page)
        for entry in old:
            for page in entry.pages:
                self.pool.drop(page)
        for sequence, entry in zip(sequences, new, strict=True):
            self.entries[sequence] = entry
        return [(sequences[o], s) for s, o in zip(sequences, origin, strict=True) if sequences[o] != s]
