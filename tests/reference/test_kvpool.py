"""The ledger of pages against plain lists: nothing is lost, nothing leaks, whatever the order of events."""

import random

import pytest

from anybit.kvpool import CacheError, CopyPage, CopyRing, Ledger, PagePool, Unpack


class Memory:
    """Pages and rings as lists of token names; carries out the ledger's actions as the cache does with tensors."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.pages = [[None] * ledger.page for _ in ledger.pool.references]
        self.rings = [[None] * ledger.ring for _ in ledger.entries]

    def act(self, actions):
        for a in actions:
            if isinstance(a, CopyPage):
                self.pages[a.target] = list(self.pages[a.source])
            elif isinstance(a, CopyRing):
                self.rings[a.target] = list(self.rings[a.source])
            elif isinstance(a, Unpack):
                first = a.begin - a.begin % self.ledger.page
                held = [token for page in a.pages for token in self.pages[page]]
                for i in range(a.begin, a.end):
                    self.rings[a.sequence][i % self.ledger.ring] = held[i - first]

    def write(self, sequence, tokens):
        entry, ledger = self.ledger.entry(sequence), self.ledger
        old = entry.length - len(tokens)
        begin, end = ledger.packed(old), ledger.packed(entry.length)
        ring = self.rings[sequence]
        fresh = [ring[i % ledger.ring] for i in range(begin, old)] + list(tokens)
        for i in range(begin, end):
            self.pages[entry.pages[i // ledger.page]][i % ledger.page] = fresh[i - begin]
        for i in range(max(old, entry.length - ledger.ring), entry.length):
            ring[i % ledger.ring] = tokens[i - old]

    def read(self, sequence):
        entry, ledger = self.ledger.entry(sequence), self.ledger
        packed = ledger.packed(entry.length)
        ring = self.rings[sequence]
        return [self.pages[entry.pages[i // ledger.page]][i % ledger.page] for i in range(packed)] + [
            ring[i % ledger.ring] for i in range(packed, entry.length)
        ]


def life(seed, window=16, page=32, slack=16):
    """One random life of a small cache; returns nothing, asserts everything."""
    rng = random.Random(seed)
    ledger = Ledger(4, 10, window, page, slack, 160)
    memory, model, name = Memory(ledger), {}, 0
    for _ in range(rng.randrange(4, 14)):
        act = rng.random()
        live = list(model)
        try:
            if not live or act < 0.15:
                model[ledger.add()] = []
            elif act < 0.6:
                s, n = rng.choice(live), rng.choice((1, 2, 3, 15, 16, 17, 40))
                memory.act(ledger.extend(s, n))
                tokens = list(range(name, name + n))
                name += n
                memory.write(s, tokens)
                model[s] = model[s] + tokens
            elif act < 0.72:
                s = rng.choice(live)
                target, actions = ledger.fork(s)
                memory.act(actions)
                model[target] = list(model[s])
            elif act < 0.86:
                s = rng.choice(live)
                n = rng.randrange(len(model[s]) + 1)
                memory.act(ledger.crop(s, n))
                model[s] = model[s][:n]
            elif act < 0.93:
                origin = [rng.randrange(len(live)) for _ in live]
                copies = ledger.reorder(live, origin)
                rings = [list(memory.rings[source]) for source, _ in copies]
                for (_, target), ring in zip(copies, rings, strict=True):
                    memory.rings[target] = ring
                model = dict(zip(live, [list(model[live[o]]) for o in origin], strict=True))
            else:
                s = rng.choice(live)
                ledger.free(s)
                del model[s]
        except CacheError:
            pass  # full: refused as a whole, and everything below must still hold
        for s, tokens in model.items():
            assert memory.read(s) == tokens, (seed, s)
            entry = ledger.entry(s)
            assert entry.oldest <= max(entry.length - min(slack, entry.length), ledger.packed(entry.length))
        owned = [p for s in model for p in ledger.entry(s).pages]
        assert all(ledger.pool.references[p] == owned.count(p) for p in range(10))
        assert ledger.pool.available == 10 - len(set(owned))
    for s in list(model):
        ledger.free(s)
    assert ledger.pool.available == 10 and not any(ledger.pool.references)


def test_ten_thousand_random_lives_lose_and_leak_nothing():
    for seed in range(10_000):
        life(seed, *((16, 32, 16), (16, 16, 16), (32, 32, 0))[seed % 3])


def test_a_full_pool_refuses_as_a_whole():
    ledger = Ledger(2, 2, 16, 16, 16, 160)
    s = ledger.add()
    ledger.extend(s, 31)
    with pytest.raises(CacheError, match="2 more pages"):
        ledger.extend(s, 30)
    assert ledger.entry(s).length == 31 and len(ledger.entry(s).pages) == 1
    with pytest.raises(CacheError, match="at most 160"):
        ledger.extend(s, 200)
    with pytest.raises(CacheError, match="cannot be cropped"):
        ledger.crop(s, 32)
    with pytest.raises(CacheError, match="not in the cache"):
        ledger.extend(1, 1)


def test_freeing_twice_is_found():
    pool = PagePool(1)
    page = pool.take()
    pool.drop(page)
    with pytest.raises(CacheError, match="freed twice"):
        pool.drop(page)
