"""The page ledger against plain lists: nothing is lost, nothing leaks, whatever the order of events.

``test_kv_histories.py`` tests whole caches; here are only plans and pages, and smaller
windows and pages than kernels support.
"""

import random

from anybit.cache.ledger import CacheError, Copy, Ledger


class Memory:
    """Pages and rings as lists of token names; performs the ledger's actions as the cache does on tensors."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.pages = [[None] * ledger.page for _ in ledger.pool.references]
        self.rings = [[None] * ledger.ring for _ in ledger.entries]

    def commit(self, change):
        for a in change.actions:
            if isinstance(a, Copy):
                memory = self.pages if a.of == "pages" else self.rings
                for target, held in zip(a.targets, [list(memory[source]) for source in a.sources], strict=True):
                    memory[target] = held
            else:
                first = a.begin - a.begin % self.ledger.page
                held = [token for page in a.pages for token in self.pages[page]]
                for i in range(a.begin, a.end):
                    self.rings[a.sequence][i % self.ledger.ring] = held[i - first]
        self.ledger.commit(change)

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
    """One random history of a small cache; asserts everything."""
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
                memory.commit(ledger.plan_extend([s], [n]))
                tokens = list(range(name, name + n))
                name += n
                memory.write(s, tokens)
                model[s] = model[s] + tokens
            elif act < 0.75:
                s = rng.choice(live)
                n = rng.randrange(len(model[s]) + 1)
                memory.commit(ledger.plan_crop(s, n))
                model[s] = model[s][:n]
            elif act < 0.93:
                origin = [rng.randrange(len(live)) for _ in live]
                memory.commit(ledger.plan_reorder(live, origin))
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


def test_ledger_loses_and_leaks_nothing_in_random_lives():
    for seed in range(10_000):
        life(seed, *((16, 32, 16), (16, 16, 16), (32, 32, 0))[seed % 3])


def extend(ledger, sequences, tokens):
    change = ledger.plan_extend(sequences, tokens)
    ledger.commit(change)
    return change


def test_ledger_copies_a_shared_page_for_all_but_one_owner():
    """Three owners of a half-full page, and two free pages: enough, and one is enough for one owner."""
    ledger = Ledger(3, 3, 16, 32, 16, 160)
    rows = [ledger.add() for _ in range(3)]
    extend(ledger, rows[:1], [20])
    ledger.commit(ledger.plan_reorder(rows, [0, 0, 0]))
    assert ledger.plan_extend(rows[:1], [12]).taken == 1
    change = extend(ledger, rows, [12, 12, 12])
    assert change.taken == 2 and len(change.actions[0].targets) == 2
    assert len({ledger.entry(row).pages for row in rows}) == 3
    assert ledger.pool.references == [1, 1, 1]
