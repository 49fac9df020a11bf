"""Random histories of a KV cache, with invalid steps among them, against a small model.

The model has no reference counts or plans. It holds lists of token names and of page objects; a step runs
naively on a copy, which is discarded if the step proves impossible. After every step, refused or not, the cache's
ledger and device tables must match the model; now and then, and at
the end, so must its tokens and the attention of sequences over them.

    python tests/cases_kv.py 20000        run so many histories, by hand: half an hour on one core
"""

import random
import sys
import time

import torch

from anybit.cache.attention import attend, decode
from anybit.cache.kvcache import KVCache
from anybit.errors import AnyBitError

LAYERS, HEADS, DIM, SEQUENCES, CAPACITY = 2, 2, 64, 4, 400
VALUES = torch.randn(2, LAYERS, 4096, HEADS, DIM, generator=torch.Generator().manual_seed(0)).half()
"""K and V of the token of each name."""


def values(names):
    """K and V [2, layers, tokens, heads, dim] of tokens."""
    return VALUES[:, :, [name % VALUES.shape[2] for name in names]]


class Refused(Exception):
    """The model refuses the step."""


class Model:
    """Sequences as lists of token names and page objects; ``None`` for no sequence."""

    def __init__(self, pages, page, window):
        self.pages, self.page, self.window = pages, page, window
        self.tokens = [None] * SEQUENCES
        self.owned = [[] for _ in range(SEQUENCES)]
        self.named = 0

    def do(self, step, *arguments):
        """Run a step, all or nothing; returns its result."""
        before = [None if t is None else list(t) for t in self.tokens], [list(o) for o in self.owned]
        try:
            found = getattr(self, step)(*arguments)
            if len({id(page) for owned in self.owned for page in owned}) > self.pages:
                raise Refused("pages")
            if any(len(t or ()) > CAPACITY for t in self.tokens):
                raise Refused("capacity")
            return found
        except Refused:
            self.tokens, self.owned = before
            raise

    def live(self, *sequences):
        """Whether these are distinct names of sequences."""
        for s in sequences:
            if type(s) is not int or not 0 <= s < SEQUENCES or self.tokens[s] is None:
                raise Refused("no sequence")
        if len(set(sequences)) < len(sequences):
            raise Refused("twice")

    def whole(self, *numbers):
        if any(type(n) is not int or n < 0 for n in numbers):
            raise Refused("no number")

    def held(self, s):
        """Number of pages that hold tokens."""
        packed = len(self.tokens[s]) // self.window * self.window
        return -(-packed // self.page)

    def add(self):
        if None not in self.tokens:
            raise Refused("full")
        s = self.tokens.index(None)
        self.tokens[s] = []
        return s

    def free(self, s):
        self.live(s)
        self.tokens[s], self.owned[s] = None, []

    def crop(self, s, length):
        self.live(s)
        self.whole(length)
        if length > len(self.tokens[s]):
            raise Refused("longer")
        del self.tokens[s][length:]
        del self.owned[s][self.held(s) :]

    def reorder(self, sequences, origin):
        self.live(*sequences)
        self.whole(*origin)
        if len(origin) != len(sequences) or any(o >= len(sequences) for o in origin):
            raise Refused("origins")
        tokens = [list(self.tokens[sequences[o]]) for o in origin]
        owned = [self.owned[sequences[o]] for o in origin]
        for s, t, o in zip(sequences, tokens, owned, strict=True):
            self.tokens[s], self.owned[s] = t, list(o)

    def extend(self, sequences, counts):
        self.live(*sequences)
        self.whole(*counts)
        if len(counts) != len(sequences):
            raise Refused("counts")
        for s, n in zip(sequences, counts, strict=True):
            if len(self.tokens[s]) + n > CAPACITY:
                raise Refused("capacity")
            old = len(self.tokens[s]) // self.window * self.window
            new = (len(self.tokens[s]) + n) // self.window * self.window
            if new > old and old % self.page:
                tail = self.owned[s][old // self.page]
                if any(page is tail for other in range(SEQUENCES) if other != s for page in self.owned[other]):
                    self.owned[s][old // self.page] = object()
            while len(self.owned[s]) * self.page < new:
                self.owned[s].append(object())
            self.tokens[s] += range(self.named, self.named + n)
            self.named += n


ODD_NUMBERS = (1.5, 1.0, True, -1, 10**30, None, "3", 2**31)
ODD_SEQUENCES = (-1, SEQUENCES, True, 0.0, 10**30, None)
STEPS = ("extend", "extend", "extend", "extend", "crop", "crop", "reorder", "reorder", "reorder", "add", "add", "free")


class History:
    """One random history of a cache and its model. ``refused`` and ``done`` count steps."""

    def __init__(self, seed):
        self.seed, self.rng = seed, random.Random(seed)
        # Windows are 64 or 128 tokens; pages of 256 can be half full. Few pages, so that they run out.
        page, pages = ((64, 12), (256, 4), (128, 7))[seed % 3]
        self.cache = KVCache(
            "kv16", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, sequences=SEQUENCES, capacity=CAPACITY,
            pages=pages, page=page, slack=(32, 0, 64)[seed // 3 % 3],
        )  # fmt: skip
        self.model = Model(pages, page, self.cache.window)
        self.refused = self.done = 0

    def run(self, steps):
        for i in range(steps):
            self.step()
            self.compare_tables()
            if self.rng.random() < 0.08 or i == steps - 1:
                self.compare_tokens()
        for s in range(SEQUENCES):
            if self.model.tokens[s] is not None:
                self.cache.free(s)
        assert self.cache.ledger.pool.available == self.model.pages and not any(self.cache.ledger.pool.references)

    def step(self):
        name = self.rng.choice(STEPS)
        arguments = getattr(self, f"_{name}", self._one)()
        try:
            expected = self.model.do(name, *arguments)
        except Refused:
            try:
                getattr(self.cache, name)(*arguments)
            except AnyBitError as error:
                assert len(str(error)) < 300 and "\n" not in str(error)
            else:
                raise AssertionError(f"history {self.seed}: {name}{arguments} was done") from None
            self.refused += 1
            return
        assert getattr(self.cache, name)(*arguments) == expected, (self.seed, name, arguments)
        self.done += 1
        if name == "extend":
            for s, n in zip(*arguments, strict=True):
                if n:
                    new = values(self.model.tokens[s][-n:])
                    for layer in range(LAYERS):
                        self.cache.write(layer, [s], new[0, layer][None], new[1, layer][None])

    # ---- arguments: mostly valid, sometimes invalid

    def _sequences(self):
        live = [s for s in range(SEQUENCES) if self.model.tokens[s] is not None]
        chosen = self.rng.sample(live, self.rng.randint(min(1, len(live)), len(live)))
        if self.rng.random() < 0.1:
            chosen.insert(self.rng.randint(0, len(chosen)), self.rng.choice((*ODD_SEQUENCES, *range(SEQUENCES))))
        return chosen

    def _one(self):
        return (self.rng.choice([*self._sequences(), self.rng.randrange(SEQUENCES)]),)

    def _add(self):
        return ()

    def _extend(self):
        sequences = self._sequences()
        most = self.rng.choice((1, 3, 64, 130, 300))
        counts = [self.rng.randint(most // 3, most) for _ in sequences]
        if counts and self.rng.random() < 0.12:
            counts[self.rng.randrange(len(counts))] = self.rng.choice(ODD_NUMBERS)
        if counts and self.rng.random() < 0.04:
            counts.pop()
        return sequences, counts

    def _crop(self):
        (s,) = self._one()
        tokens = self.model.tokens[s] if type(s) is int and 0 <= s < SEQUENCES else None
        length = self.rng.randint(0, len(tokens or ()) + 2)
        if tokens and self.rng.random() < 0.5:
            length = max(len(tokens) - self.rng.randint(0, 40), 0)
        return s, self.rng.choice(ODD_NUMBERS) if self.rng.random() < 0.12 else length

    def _reorder(self):
        sequences = self._sequences()
        origin = [self.rng.randrange(len(sequences)) for _ in sequences]
        if origin and self.rng.random() < 0.15:
            origin[self.rng.randrange(len(origin))] = self.rng.choice((*ODD_NUMBERS, len(origin)))
        if self.rng.random() < 0.08:
            origin = origin[1:] if self.rng.random() < 0.5 else [*origin, 0]
        return sequences, origin

    # ---- the cache against the model

    def compare_tables(self):
        """Compare ledger and device tables: lengths, page owners, reference counts."""
        ledger, model = self.cache.ledger, self.model
        table, lengths = self.cache.table.tolist(), self.cache.lengths.tolist()
        numbers, objects = [], []
        for s, tokens in enumerate(model.tokens):
            length, pages = (0, ()) if tokens is None else (len(tokens), ledger.entry(s).pages)
            assert (ledger.entries[s] is None) == (tokens is None), (self.seed, s)
            assert lengths[s] == length == (tokens is not None and self.cache.length(s)), (self.seed, s)
            assert table[s] == [*pages, *[-1] * (len(table[s]) - len(pages))], (self.seed, s)
            assert len(pages) == len(model.owned[s]), (self.seed, s)
            numbers += pages
            objects += map(id, model.owned[s])
        pairs = set(zip(numbers, objects, strict=True))
        assert len(pairs) == len(set(numbers)) == len(set(objects)), self.seed
        assert ledger.pool.references == [numbers.count(p) for p in range(model.pages)], self.seed
        assert ledger.pool.available == model.pages - len(set(numbers)), self.seed

    def compare_tokens(self):
        """Compare cache contents, bit for bit, and attention over them."""
        rows = [s for s, tokens in enumerate(self.model.tokens) if tokens]
        held = {s: values(self.model.tokens[s]).transpose(2, 3).float() for s in rows}
        for layer in range(LAYERS):
            for s in rows:
                for got, want in zip(self.cache.read(layer, s), held[s][:, layer], strict=True):
                    assert torch.equal(got, want), (self.seed, s)
        if rows:
            q = VALUES[0, 0, : len(rows), None]
            out = decode(q, self.cache, LAYERS - 1, rows)[0]
            for i, s in enumerate(rows):
                want = attend(q[i].float(), *held[s][:, -1])[0]
                torch.testing.assert_close(out[i].float(), want, rtol=0, atol=2e-3)


def run(histories, first=0):
    """Run so many histories; returns the numbers of steps done and refused."""
    done = refused = 0
    for seed in range(first, first + histories):
        history = History(seed)
        history.run(history.rng.randint(8, 40))
        done, refused = done + history.done, refused + history.refused
        if histories > 1000 and seed % 1000 == 999:
            print(seed + 1, "histories", flush=True)
    return done, refused


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin, count = time.monotonic(), int(sys.argv[1])
    done, refused = run(count)
    print(f"{count} histories, {done} steps done, {refused} refused, 0 differences, {time.monotonic() - begin:.0f} s")
