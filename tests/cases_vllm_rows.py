"""Random request lifetimes through vLLM's real scheduler and block manager, against a model of the memory.

The worker here sees only SchedulerOutput, as a real one does, and moves token names instead of keys and values.
A token's name is a hash of its whole prefix, so a wrong block, a stale page and a page published before
it is packed all show. After every step, every token of every running request is where it should be, no residual is
shared, reference counts match the rows, and whatever the prefix cache could hand out is packed.

    python tests/cases_vllm_rows.py 20        20 seeds of every kind, by hand
"""

import collections
import json
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from anybit.ops import kv_rows
from anybit.ops.kv_rows import PAGE
from anybit.scheme import KVFormat
from anybit.vllm import kv_spec
from anybit.vllm.kv_spec import RowSpec

LONGEST = 2048


@dataclass(frozen=True)
class Life:
    """A scenario. pages: of the pool.  budget: tokens per step.  ahead: steps in flight.
    beside: other layers with a 16-bit sliding window.  together: pages per block, beside layers with recurrent state.
    late: a fault, pages are packed one step too late.
    """

    format: str = "kv4g128"
    slack: int = 0
    drafts: int = 0
    pages: int = 60
    budget: int = 200
    seqs: int = 12
    requests: int = 60
    caching: bool = True
    longer: bool = False
    ahead: int = 0
    beside: bool = False
    together: int = 1
    late: bool = False
    seed: int = 0

    def __str__(self):
        changed = {name: value for name, value in vars(self).items() if value != getattr(Life, name)}
        return "-".join(f"{name}{value}" for name, value in changed.items()) or "plain"

    @property
    def rows(self):
        return kv_rows.layout(KVFormat.parse(self.format), 128, self.slack, self.together)


LIVES = [
    Life(),
    Life(seed=1, ahead=1),
    Life(seed=2, pages=34, seqs=8, longer=True),
    Life(seed=3, format="kv2g128"),
    Life(seed=4, caching=False),
    Life(seed=5, slack=32, drafts=4),
    Life(seed=6, budget=67),
    Life(seed=7, budget=2048, pages=200, seqs=40),
    Life(seed=8, format="kv8", pages=40),
    Life(seed=9, beside=True, pages=100),
    Life(seed=10, together=3, pages=40, caching=False),
    Life(seed=11, together=16, pages=20, caching=False, seqs=8),
]


def names(tokens):
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


class Worker:
    """What a backend does with rows: pack, then all read, then the newest tokens go to the ring."""

    def __init__(self, life: Life, group: int) -> None:
        rows = life.rows
        self.front, self.ring, self.per_page = rows.front, rows.ring, rows.slots
        self.life, self.group = life, group
        self.pages: dict[int, list[int]] = {}  # page of the pool -> names of 128 tokens, packed
        self.slots: dict[tuple[int, int], int] = {}  # (page of the pool, slot) -> name, in 16 bits
        self.rows: dict[str, list[list[int]]] = {}

    def place(self, request, position):
        slot = position % self.ring
        return self.entry(request, slot // self.per_page), slot % self.per_page

    def page(self, request, index):
        return self.entry(request, self.front + index)

    def entry(self, request, index):
        """The kernel's table entry at an index: a page of the pool, whose blocks are ``together`` pages."""
        together = self.life.together
        return self.rows[request][self.group][index // together] * together + index % together

    def update(self, out):
        for one in out.scheduled_new_reqs:
            self.rows[one.req_id] = [list(blocks) for blocks in one.block_ids]
        cached = out.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            new = cached.new_block_ids[i]
            if request in cached.resumed_req_ids:
                self.rows[request] = [list(blocks) for blocks in new]
            elif new is not None:
                for old, more in zip(self.rows[request], new, strict=True):
                    old += more

    def step(self, out, computed, tokens):
        """computed: tokens of each request before the step; tokens: all of them, drafts included."""
        self.update(out)
        work = [(r, computed[r], n, names(tokens[r])[: computed[r] + n]) for r, n in out.num_scheduled_tokens.items()]
        for request, before, n, new in work:
            first, more = before // PAGE, n
            if self.life.late:
                first, more = max(before - 1, 0) // PAGE, 0
            for k in range(first, (before + more) // PAGE):
                here = range(k * PAGE, k * PAGE + PAGE)
                got = [self.slots.get(self.place(request, p)) if p < before else new[p] for p in here]
                assert got == new[k * PAGE : k * PAGE + PAGE], f"page {k} of {request} is packed from wrong tokens"
                self.pages[self.page(request, k)] = got
        for request, before, n, new in work:
            for k in range((before + n - 1) // PAGE):
                assert self.pages.get(self.page(request, k)) == new[k * PAGE : k * PAGE + PAGE], (
                    f"page {k} of {request}"
                )
            for p in range(before // PAGE * PAGE, before):
                assert self.slots.get(self.place(request, p)) == new[p], f"token {p} of {request} is not in its ring"
        for request, before, n, new in work:
            for p in range(max(before, before + n - self.ring), before + n):
                self.slots[self.place(request, p)] = new[p]


def model() -> str:
    """A folder with a tiny Llama's configuration."""
    folder = Path(tempfile.gettempdir()) / "anybit-rows-model"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build(life: Life) -> tuple[Any, int, Any]:
    """A scheduler, the sizes of hashed blocks, and the spec of packed layers."""
    more = {}
    if life.drafts:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": life.drafts, "prompt_lookup_max": 3
        }  # fmt: skip
    config = EngineArgs(
        model=model(), skip_tokenizer_init=True, max_model_len=LONGEST, block_size=PAGE, max_num_seqs=life.seqs,
        max_num_batched_tokens=life.budget, enable_prefix_caching=life.caching, enforce_eager=True,
        async_scheduling=bool(life.ahead), **more,
    ).create_engine_config()  # fmt: skip
    if hasattr(config.cache_config, "get_resolved_kv_cache_layout"):
        config.cache_config.kv_cache_layout = "LBNHC"
    kv_spec.register()
    plain = FullAttentionSpec(block_size=PAGE * life.together, num_kv_heads=8, head_size=128, dtype=torch.uint8)
    spec = RowSpec.of(plain, life.rows)
    layers: dict[str, Any] = {f"l{i}": spec for i in range(2)}
    if life.beside:
        window = SlidingWindowSpec(
            block_size=32, num_kv_heads=8, head_size=128, dtype=torch.float16, sliding_window=160,
            page_size_padded=spec.page_size_bytes,
        )  # fmt: skip
        layers |= {f"w{i}": window for i in range(2)}
    if life.together > 1:
        size = (spec.page_size_bytes // 4 - 100,)
        state = MambaSpec(
            block_size=LONGEST, shapes=(size,), dtypes=(torch.float32,), page_size_padded=spec.page_size_bytes
        )
        layers |= {f"s{i}": state for i in range(2)}
    with set_current_vllm_config(config):
        memory = [life.pages * spec.page_size_bytes * 2]
        cache = planning.generate_scheduler_kv_cache_config(configs_of(config, layers, memory))
        config.cache_config.num_gpu_blocks = cache.num_blocks
        sizes = planning.resolve_kv_cache_block_sizes(cache, config)
        planning.init_none_hash(sha256)
        kind = AsyncScheduler if life.ahead else Scheduler
        scheduler = kind(
            vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
            block_size=sizes[0], hash_block_size=sizes[1], log_stats=True,
        )  # fmt: skip
    return scheduler, sizes[1], spec


def configs_of(config, layers, memory):
    """KV cache configs of workers with these layers; the planner moves in vLLM 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:
        return planning.get_kv_cache_configs(config, [layers], memory)
    groups = kv_cache_planning.get_global_kv_cache_groups(config, [layers])
    return kv_cache_planning.get_kv_cache_configs(config, [layers], memory, groups)


class World:
    """Requests, the scheduler and the worker."""

    def __init__(self, life: Life) -> None:
        self.life, self.rng = life, random.Random(life.seed)
        self.scheduler, size, self.spec = build(life)
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.group = next(i for i, m in enumerate(self.managers) if isinstance(m.kv_cache_spec, RowSpec))
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.total = self.pool.get_num_free_blocks()
        self.worker = Worker(life, self.group)
        self.live: dict[str, Any] = {}
        self.known: dict[str, list[int]] = {}
        self.count: collections.Counter[str] = collections.Counter()
        hasher = planning.get_request_block_hasher(size, sha256)
        self.waiting = [self.request(i, hasher) for i in range(life.requests)]

    def request(self, i, hasher):
        rng = self.rng
        if i == 0:
            lengths = (100, 128, 256, 300, 384, 700)
            self.prefixes = [[rng.randrange(500) for _ in range(rng.choice(lengths))] for _ in range(5)]
        prompt = rng.choice(self.prefixes)
        prompt = prompt[: rng.choice((len(prompt), 128, 256, len(prompt)))]
        prompt = prompt + [rng.randrange(500) for _ in range(rng.choice((0, 1, 5, 50, 127, 128, 200)))]
        most = rng.choice((300, 500, 700) if self.life.longer else (1, 3, 40, 130, 300))
        return Request(
            request_id=f"r{i}", prompt_token_ids=prompt, pooling_params=None, block_hasher=hasher,
            sampling_params=SamplingParams(max_tokens=most, ignore_eos=True, temperature=0),
        )  # fmt: skip

    def live_through(self) -> dict[str, int]:
        """Run all requests to their end; returns event counts."""
        flying: collections.deque[Any] = collections.deque()
        scheduler = self.scheduler
        while self.waiting or scheduler.has_requests():
            while self.waiting and self.rng.random() < 0.4:
                one = self.waiting.pop()
                self.live[one.request_id] = one
                scheduler.add_request(one)
            if scheduler.running and self.rng.random() < 0.02:
                victim = self.rng.choice(list(scheduler.running)).request_id
                scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
                self.count["aborted"] += 1
            flying.append(self.step())
            if len(flying) <= self.life.ahead and scheduler.has_requests() and flying[-1][1]:
                continue
            self.settle(*flying.popleft())
            if not self.life.ahead:
                self.check()
        while flying:
            self.settle(*flying.popleft())
        assert self.pool.get_num_free_blocks() == self.total, "blocks leak"
        assert not any(m.req_to_blocks or m.num_cached_block for m in self.managers), "a request is not forgotten"
        assert not self.managers[self.group].fronts, "residuals are not forgotten"
        return dict(self.count)

    def step(self):
        before = {r: one.num_preemptions for r, one in self.live.items()}
        out = self.scheduler.schedule()
        cached = out.scheduled_cached_reqs
        self.count["steps"] += 1
        self.count["preempted"] += sum(self.live[r].num_preemptions - n for r, n in before.items())
        computed = {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
        assert all(n % PAGE == 0 for n in computed.values())
        self.count["hit tokens"] += sum(computed.values())
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = out.scheduled_spec_decode_tokens
        for r in out.num_scheduled_tokens:
            self.known.setdefault(r, list(self.live[r].prompt_token_ids))
        tokens = {r: self.known[r] + list(drafts.get(r, ())) for r in out.num_scheduled_tokens}
        self.worker.step(out, computed, tokens)
        self.check_published()
        sampled, ids = [], list(out.num_scheduled_tokens)
        for r in ids:
            if computed[r] + out.num_scheduled_tokens[r] < len(self.known[r]):
                sampled.append([])  # a chunk of a prompt
                continue
            got = drafts.get(r, [])
            taken = self.rng.randrange(len(got) + 1) if got else 0
            self.count["drafts"] += len(got)
            self.count["accepted"] += taken
            sampled.append([*got[:taken], self.rng.randrange(500)])
            self.known[r] += sampled[-1]
        return out, ids, sampled

    def settle(self, out, ids, sampled):
        index = {r: i for i, r in enumerate(ids)}
        done = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)
        self.scheduler.update_from_output(out, done)
        if self.life.drafts:
            ids = [r.request_id for r in self.scheduler.running if r.num_computed_tokens >= r.num_tokens - 1]
            count = self.rng.randrange
            drafts = [[count(500) for _ in range(count(self.life.drafts + 1))] for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def check(self):
        """After a step: all is readable, nothing is shared that must not be, every block is counted."""
        rows, worker = collections.Counter(), self.worker
        residuals: collections.Counter[int] = collections.Counter()
        null = self.pool.null_block.block_id
        for one in self.scheduler.running:
            r, n = one.request_id, one.num_computed_tokens
            owned = [[b.block_id for b in m.req_to_blocks[r]] for m in self.managers]
            if not any(owned):
                continue
            for real, seen in zip(owned, worker.rows[r], strict=True):
                assert len(real) == len(seen) and all(a in (b, null) for a, b in zip(real, seen, strict=True)), r
            tokens = names(list(one.all_token_ids))[:n]
            for k in range(n // PAGE):
                assert worker.pages.get(worker.page(r, k)) == tokens[k * PAGE : k * PAGE + PAGE], f"page {k} of {r}"
            for p in range(n // PAGE * PAGE, n):
                assert worker.slots.get(worker.place(r, p)) == tokens[p], f"token {p} of {r} is not in its ring"
            front = self.managers[self.group].fronts.get(r, 0)
            residuals.update(owned[self.group][:front])
            rows.update(b for blocks in owned for b in blocks if b != null)
        assert all(rows[b] == 1 for b in residuals), "a residual block is shared"
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == rows[block.block_id], (block.block_id, block.ref_cnt, rows[block.block_id])
                assert block.block_id not in residuals or block.block_hash is None, "a residual block is published"
        assert self.pool.get_num_free_blocks() == self.total - len(rows), "blocks leak"

    def check_published(self):
        """Every block that the prefix cache could hand out holds a packed page, and equal hashes equal pages."""
        seen: dict[Any, list[int]] = {}
        for block in self.pool.blocks:
            if block.block_hash is not None and planning.get_group_id(block.block_hash) == self.group:
                page = self.worker.pages.get(block.block_id * self.life.together)
                assert page is not None, f"block {block.block_id} is published before it is packed"
                assert seen.setdefault(block.block_hash, page) == page, "one hash, two contents"


if __name__ == "__main__":
    for life in LIVES:
        total: collections.Counter[str] = collections.Counter()
        for seed in range(int(sys.argv[1])):
            total.update(World(replace(life, seed=seed)).live_through())
        print(life, dict(total), flush=True)
