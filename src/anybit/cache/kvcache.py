"""The quantized KV cache: pages of codes, a 16-bit residual for the newest tokens, and operations on sequences.

Everything here is plain torch and runs anywhere; on a GPU ``write`` launches one kernel. A step is

    cache.extend(sequences, n)              allocate pages for n more tokens each, and update lengths
    cache.write(layer, sequences, k, v)     store their K and V, for every layer
    attention.decode(q, cache, layer, sequences)

``extend`` may update tables on the host; ``write`` and attention only use fixed device addresses, so a CUDA graph of
them stays valid while sequences grow.

Operations on sequences are atomic: they succeed, or raise CacheError and change nothing on host or device.
``Ledger`` plans a change first; the copies are made next, and only then do both sides commit it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit.cache.ledger import MOST, CacheError, Change, Independent, Ledger, Unpack, check_page, check_size, whole
from anybit.codes.hadamard import matrix
from anybit.device import memory_of
from anybit.errors import LayerError
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.kv_page import HALF_MAX, PageLayout, ring_places
from anybit.ops import kv
from anybit.ops.kv import LayerView
from anybit.scheme import KVFormat, is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 128
"""Most tokens packed at a time: Eq. 1 of BitDecoding for 4 bits (8 tokens x 4 warps x 4 codes per word)."""


class KVCache(Independent):
    """K and V of all layers of up to ``sequences`` sequences of up to ``capacity`` tokens each.

    format: KVFormat or its text ("kv4", "k4v2g32t").  pages: size of the pool that all sequences share (default: enough
    for every sequence at capacity).  page: 64, 128 or 256 tokens.  slack: how many of the newest tokens can be cropped
    exactly, even if some were packed meanwhile; a decode step may bring up to slack + 1 tokens.
    dtype: float16 or bfloat16, of the residual and of 16-bit pages.

    Tensors (addresses stay fixed until ``grow``):
        pages     uint8 [layers, pages, kv_heads, page_bytes]; kv_page.py describes the bytes
        residual  dtype [layers, sequences, kv_heads, 2, ring * head_dim], K and V in tensor-core fragment order
        table     int32 [sequences, capacity / page], the page table; -1 where there is no page
        lengths   int32 [sequences], tokens of each sequence, the newest included

    Raises LayerError for a size that is not a positive integer, and for a head_dim that the format does not divide.
    Methods raise CacheError, and change nothing, for a sequence that does not exist or tokens that do not fit.
    Copies and unpickled caches are independent.
    """

    @torch.inference_mode(False)  # inference tensors could not be written later, outside that mode
    def __init__(
        self,
        format: KVFormat | str,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        sequences: int,
        capacity: int,
        pages: int | None = None,
        page: int = 128,
        slack: int = 32,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise LayerError(f"a KV cache keeps its newest tokens in float16 or bfloat16, not {dtype}")
        sizes = {"layers": layers, "kv_heads": kv_heads, "sequences": sequences, "capacity": capacity}
        for name, size in (sizes if pages is None else {**sizes, "pages": pages}).items():
            check_size(name, size)
        if not is_whole(head_dim):
            raise LayerError(f"head_dim must be a whole number, not {head_dim!r}")
        check_page(page, slack)
        self.format = format if isinstance(format, KVFormat) else KVFormat.parse(format)
        self.layout = PageLayout(self.format, head_dim, page)
        self.window = min(page, WINDOW)
        per_sequence = -(-capacity // page)
        count = sequences * per_sequence if pages is None else pages
        device = torch.device(device)
        self._check_memory(layers, sequences, count, kv_heads, self.window + slack, device)
        self.ledger = Ledger(sequences, count, self.window, page, slack, capacity)
        self.layers, self.kv_heads, self.head_dim, self.dtype = layers, kv_heads, head_dim, dtype
        self.rotation = hadamard(head_dim, dtype, device) if self.format.rotate else None
        self.pages = torch.zeros(layers, count, kv_heads, self.layout.page_bytes, dtype=torch.uint8, device=device)
        ring = self.ledger.ring
        self.residual = torch.zeros(layers, sequences, kv_heads, 2, ring * head_dim, dtype=dtype, device=device)
        self.table = torch.full((sequences, per_sequence), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._places = ring_places(ring, head_dim).to(device)
        self._rows: dict[tuple[object, ...], Tensor] = {}
        self.newest_are_few = False
        """Whether the last write was a decode step, not a prompt: attention may then start reading pages early."""
        self.number = kv.register(self)
        """The handle by which torch.library ops, which cannot take objects, find this cache."""

    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, object]) -> None:
        """Become a copy: under a number of its own, with tensors that can be written and that no process shares."""
        for name, value in state.items():
            if isinstance(value, Tensor) and (value.is_inference() or (not value.is_cuda and value.is_shared())):
                value = value.clone()
            setattr(self, name, value)
        self._rows, self.number = {}, kv.register(self)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.pages.device

    def _check_memory(
        self, layers: int, sequences: int, pages: int, kv_heads: int, ring: int, device: torch.device
    ) -> None:
        """Raise LayerError for a cache larger than the device's memory, before anything is allocated."""
        size = layers * kv_heads * (pages * self.layout.page_bytes + sequences * 4 * ring * self.layout.head_dim)
        have = memory_of(device)
        if pages > MOST or size > have:
            raise LayerError(
                f"a KV cache of {pages} pages for {sequences} sequences and {layers} layers takes {size / 1e9:.4g} GB, "
                f"and {device} has {have / 1e9:.4g}: make it for fewer or shorter sequences, or with fewer pages"
            )

    # -------- sequences

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.ledger.entry(sequence).length

    def add(self) -> int:
        """A new, empty sequence; raises CacheError when all are in use."""
        return self.ledger.add()  # ``free`` has reset the device's rows

    def free(self, sequence: int) -> None:
        """Remove a sequence and return its pages to the pool, except those that other sequences share."""
        self.ledger.free(sequence)
        self.table[sequence] = -1
        self.lengths[sequence] = 0

    def crop(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens.

        Exact for the newest ``slack`` tokens. Further back, tokens that return from pages to the residual keep their
        dequantized values.
        """
        self._commit(self.ledger.plan_crop(sequence, length))

    def reorder(self, sequences: Sequence[int], origin: Sequence[int]) -> None:
        """Sequence ``sequences[i]`` becomes what ``sequences[origin[i]]`` was (beam search).

        Pages are shared, residuals copied; of a partially filled page, whichever owner writes to it first takes a copy.
        """
        self._commit(self.ledger.plan_reorder(sequences, origin))

    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Allocate pages for ``tokens`` more tokens of each sequence and update lengths; ``write`` them next.

        All sequences or none: raises CacheError, with nothing changed, if one would exceed its capacity or the pool has
        too few pages.
        """
        counts = tokens if isinstance(tokens, Sequence) else [tokens] * len(sequences)
        change = self.ledger.plan_extend(sequences, counts)
        rows = self.row_index(tuple(change.entries))
        even = len(set(counts)) == 1  # then filled on the device, without a host copy
        more = torch.full_like(rows, whole(counts[0], "tokens"), dtype=torch.int32) if even else self._int32(counts)
        self._commit(change, lengths=False)
        self.lengths.index_add_(0, rows, more)

    def row_index(self, sequences: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """The sequences as a tensor on the cache's device; memoized."""
        key = (dtype, *sequences)
        if key not in self._rows:
            if len(self._rows) > 256:
                self._rows.clear()
            self._rows[key] = torch.tensor(sequences, dtype=dtype, device=self.device)
        return self._rows[key]

    def _commit(self, change: Change, lengths: bool = True) -> None:
        """Carry out a plan: the copies first, then the ledger and the device's tables.

        Each copy reads all its sources before it writes, so one that runs out of memory leaves the cache unchanged.
        """
        cells = [
            (sequence, i, new[i] if i < len(new) else -1)
            for sequence, old, new, first in self.ledger.moves(change)
            for i in range(first, max(len(old), len(new)))
        ]
        places = self._int32(cells).T if cells else None
        for action in change.actions:
            if isinstance(action, Unpack):
                self._unpack(action)
            else:
                held = self.pages if action.of == "pages" else self.residual
                held[:, list(action.targets)] = held[:, list(action.sources)]
        self.ledger.commit(change)
        if places is not None:
            self.table[places[0], places[1]] = places[2]
        if lengths and change.entries:
            counted = self._int32([entry.length for entry in change.entries.values()])
            self.lengths[self.row_index(tuple(change.entries))] = counted

    def _int32(self, values: Sequence[object]) -> Tensor:
        # The driver copies pageable memory before it returns: waiting for the GPU's work so far would gain nothing.
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)

    def _unpack(self, action: Unpack) -> None:
        row, first = self.row_index((action.sequence,)), action.begin - action.begin % self.layout.page
        layers = [self.tokens(layer) for layer in range(self.layers)]
        decoded = [kv_page.decode(self.layout, one.blocks(action.pages), self.dtype) for one in layers]
        for one, both in zip(layers, decoded, strict=True):
            one.write_ring(row, action.begin, *(x[:, action.begin - first : action.end - first] for x in both))

    # -------- tokens

    def write(self, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Store K and V of the newest tokens of each sequence, after ``extend`` by them.

        k, v: [len(sequences), tokens, kv_heads, head_dim] in the cache's dtype, on its device; else LayerError.
        Windows that become full are quantized into pages; the residual keeps the newest tokens in 16 bits.
        """
        self._check(layer, sequences, k, v)
        k, v = k.detach(), v.detach()  # else the cache would keep every token's autograd graph alive
        self.newest_are_few = k.shape[1] <= self.ledger.slack + 1
        k, v = self.turn(k), self.turn(v)
        if self.pages.is_cuda and not self.format.float4:
            kv.store(self.view(layer), self.row_pointer(sequences), k, v, layer)
        else:
            self._write_torch(layer, sequences, k, v)

    def _write_torch(self, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        for row, sequence in enumerate(sequences):
            self._write_one(layer, sequence, k[row].transpose(0, 1), v[row].transpose(0, 1))

    def check_layer(self, layer: int) -> None:
        """Raise LayerError for a layer that this cache does not have."""
        if not 0 <= layer < self.layers:
            raise LayerError(f"layer {layer} is not in this KV cache, which has layers 0 to {self.layers - 1}")

    def check_like(self, name: str, tensor: Tensor) -> None:
        """Raise LayerError for a tensor of another dtype, or on another device."""
        if tensor.dtype != self.dtype:
            raise LayerError(f"{name} is {tensor.dtype}, and the KV cache holds {self.dtype}: convert one of them")
        if tensor.device != self.device:
            raise LayerError(f"{name} is on {tensor.device}, and the KV cache on {self.device}: move one of them")

    def _check(self, layer: int, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        self.check_layer(layer)
        expected = (len(sequences), k.shape[1] if k.dim() == 4 else -1, self.kv_heads, self.head_dim)
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != expected:
                raise LayerError(
                    f"{name} is {tuple(tensor.shape)}, and must be [sequences, tokens, heads, dim] = {expected}"
                )
            self.check_like(name, tensor)
        for sequence in sequences:
            if k.shape[1] > self.length(sequence):
                raise CacheError(
                    f"sequence {sequence} counts {self.length(sequence)} tokens, fewer than the {k.shape[1]} to write: "
                    "call extend first"
                )

    def view(self, layer: int) -> LayerView:
        """One layer's tensors and sizes, as kernels take them."""
        return LayerView(
            self.layout, self.pages[layer], self.residual[layer], self.table, self.lengths, self.ledger.ring,
            self.window, self.ledger.capacity,
        )  # fmt: skip

    def row_pointer(self, sequences: Sequence[int]) -> Tensor | None:
        """The sequences as int32 for a kernel; None if they are 0, 1, 2 ..."""
        identity = list(sequences) == list(range(len(sequences)))
        return None if identity else self.row_index(sequences, torch.int32)

    def completes(self, sequences: Sequence[int], tokens: int) -> bool:
        """Whether the newest ``tokens`` tokens completed a window of any sequence, which then has to be packed."""
        lengths = (self.length(sequence) for sequence in sequences)
        return any(self.ledger.packed(length) > self.ledger.packed(length - tokens) for length in lengths)

    def pack(self, layer: int, sequences: Sequence[int], tokens: int) -> None:
        """Quantize the windows that the newest ``tokens`` tokens completed; all are in the residual already."""
        if self.pages.is_cuda and not self.format.float4:
            kv.pack(self.view(layer), self.row_pointer(sequences), len(sequences), tokens, layer)
            return
        for sequence in sequences:
            length = self.length(sequence)
            self._write_one(layer, sequence, *self.read_ring(layer, sequence, length - tokens, length))

    def _write_one(self, layer: int, sequence: int, k: Tensor, v: Tensor) -> None:
        """Store K and V [heads, tokens, dim] of one sequence's newest tokens, in plain torch."""
        length, tokens = self.length(sequence), k.shape[1]
        old, row, held = length - tokens, self.row_index((sequence,)), self.tokens(layer)
        begin, end = self.ledger.packed(old), self.ledger.packed(length)
        if end > begin:
            both = zip(held.read_ring(row, begin, old), (k, v), strict=True)
            blocks = kv_page.encode(self.layout, *(torch.cat(parts, 1)[:, : end - begin] for parts in both))
            owned = self.ledger.entry(sequence).pages
            per_page, block = self.layout.blocks, self.layout.block
            for i in range(blocks.shape[1]):
                index, place = divmod(begin // block + i, per_page)
                target = self.pages[layer, owned[index]].reshape(self.kv_heads, per_page, -1)
                target[:, place] = blocks[:, i]
        keep = min(tokens, self.ledger.ring)
        held.write_ring(row, length - keep, *(new[:, tokens - keep :] for new in (k, v)))

    def tokens(self, layer: int) -> "Tokens":
        """One layer's tokens in plain torch; a sequence's row is its own number."""
        halves, ring = self.residual[layer].unbind(2), self.ledger.ring
        return Tokens(self.layout, halves, self.pages[layer], self._places, ring)

    def read_ring(self, layer: int, sequence: int, begin: int, end: int) -> list[Tensor]:
        """K and V [kv_heads, end - begin, head_dim] of tokens in the residual."""
        return self.tokens(layer).read_ring(self.row_index((sequence,)), begin, end)

    def read(self, layer: int, sequence: int, newest: int = 0) -> tuple[Tensor, Tensor]:
        """K and V float32 [kv_heads, length, head_dim] as attention sees them: dequantized pages, then the residual.

        newest: how many tokens the current step brought; a window that they completed is still read from the residual.
        Rotated heads stay rotated.
        """
        length = self.length(sequence)
        packed = self.ledger.packed(max(length - newest, 0))
        if packed < self.ledger.entry(sequence).oldest:  # a prompt longer than the ring
            packed = self.ledger.packed(length)
        return self._read(layer, sequence, length, packed)

    def _read(self, layer: int, sequence: int, length: int, packed: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` tokens, of which ``packed`` come from pages."""
        held, pages = self.tokens(layer), self.ledger.entry(sequence).pages
        newest = held.read_ring(self.row_index((sequence,)), packed, length)
        both = zip(held.read_pages(pages[: -(-packed // self.layout.page)], packed), newest, strict=True)
        k, v = (torch.cat((old, new.float()), 1) for old, new in both)
        return k, v

    def read_before(self, layer: int, sequence: int, newest: int) -> tuple[Tensor, Tensor]:
        """K and V float32 [kv_heads, length - newest, head_dim], unrotated; call before the newest are written."""
        length = self.length(sequence) - newest
        k, v = self._read(layer, sequence, length, self.ledger.packed(length))
        return self.turn(k), self.turn(v)

    @torch.inference_mode(False)
    def grow(self, layers: int, capacity: int) -> None:
        """Make room for more layers and longer sequences. Contents stay; device addresses change."""
        check_size("layers", layers)
        check_size("capacity", capacity)
        layers = max(layers, self.layers)
        per_sequence = max(-(-capacity // self.layout.page), self.table.shape[1])
        sequences = self.table.shape[0]
        old = self.pages.shape[1]
        count = max(old, sequences * per_sequence)
        self._check_memory(layers, sequences, count, self.kv_heads, self.ledger.ring, self.device)
        pages = self.pages.new_zeros(layers, count, *self.pages.shape[2:])
        pages[: self.layers, :old] = self.pages
        residual = self.residual.new_zeros(layers, *self.residual.shape[1:])
        residual[: self.layers] = self.residual
        table = self.table.new_full((sequences, per_sequence), -1)
        table[:, : self.table.shape[1]] = self.table
        self.pages, self.residual, self.table, self.layers = pages, residual, table, layers
        self.ledger.pool.grow(count)
        self.ledger.capacity = max(self.ledger.capacity, per_sequence * self.layout.page)

    def turn(self, x: Tensor) -> Tensor:
        """Rotate x [..., head_dim], or rotate it back, if the format rotates heads."""
        return x if self.rotation is None else turn(x, self.rotation, self.dtype)


class Tokens:
    """A layer's tokens in plain torch: the newest of each sequence in a 16-bit ring, older ones in pages.

    halves: K and V of all rings, [blocks, kv_heads, slots * head_dim].  pages: uint8 [pages, kv_heads, page_bytes].
    places: of ``ring_places``, for the slots of a block.  A row lists the blocks of a sequence's ring: token i is in
    slot i % ring, and slot s in block s // slots.
    """

    def __init__(self, layout: PageLayout, halves: Sequence[Tensor], pages: Tensor, places: Tensor, ring: int) -> None:
        self.layout, self.halves, self.pages, self.places, self.ring = layout, halves, pages, places, ring
        self.dtype = halves[0].dtype

    def _at(self, row: Tensor, begin: int, end: int) -> list[tuple[Tensor, ...]]:
        """Where K and V of the tokens begin .. end - 1 are in ``halves``: block, head, places."""
        at, slots = torch.arange(begin, end, device=row.device) % self.ring, self.places.shape[1]
        blocks, heads = row[at // slots].long(), torch.arange(self.pages.shape[1], device=row.device)
        return [(blocks[None, :, None], heads[:, None, None], places[at % slots][None]) for places in self.places]

    def read_ring(self, row: Tensor, begin: int, end: int) -> list[Tensor]:
        """K and V [kv_heads, end - begin, head_dim] of tokens in the ring."""
        return [half[at] for half, at in zip(self.halves, self._at(row, begin, end), strict=True)]

    def write_ring(self, row: Tensor, begin: int, k: Tensor, v: Tensor) -> None:
        """Write K and V [kv_heads, n, head_dim] of the tokens from ``begin`` on into their slots."""
        for half, at, new in zip(self.halves, self._at(row, begin, begin + k.shape[1]), (k, v), strict=True):
            half[at] = new

    def blocks(self, pages: Sequence[int]) -> Tensor:
        """The blocks of pages, one after the other: uint8 [kv_heads, blocks, block_bytes]."""
        heads, layout = self.pages.shape[1], self.layout
        return self.pages[list(pages)].transpose(0, 1).reshape(heads, len(pages) * layout.blocks, layout.block_bytes)

    def read_pages(self, pages: Sequence[int], tokens: int) -> list[Tensor]:
        """K and V float32 [kv_heads, tokens, head_dim] of the first tokens in pages."""
        layout, blocks = self.layout, self.blocks(pages)[:, : tokens // self.layout.block]
        both, bits = kv_page.decode(layout, blocks, torch.float32), (layout.format.key_bits, layout.format.value_bits)
        if 16 not in bits or self.dtype == torch.float16:
            return list(both)
        exact = kv_page.decode(layout, blocks, self.dtype)
        return [e.float() if b == 16 else x for b, e, x in zip(bits, exact, both, strict=True)]


def turn(x: Tensor, rotation: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x [..., head_dim] by a cache's rotation, in x's dtype, for a cache of ``dtype``.

    Rotation can scale values by up to sqrt(head_dim): for float16 caches they are clamped to the float16 range, and a
    head with a non-finite value becomes all NaN.
    """
    if dtype != torch.float16:
        return x @ rotation.to(x.dtype)
    whole = x.nan_to_num(torch.nan, torch.nan, torch.nan)
    return (whole @ rotation.to(x.dtype)).clamp_(-HALF_MAX, HALF_MAX)


def why_not(model: "PreTrainedModel", format: KVFormat) -> str | None:
    """Why a transformers model cannot generate with a KV cache in a format; None if it can.

    Needs no weights: it is also asked before a model is quantized.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{type(model).__name__} has an encoder, and AnyBitCache is for decoders only"
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return f"{type(model).__name__} keeps a state instead of keys and values"
    heads = getattr(config, "num_attention_heads", None)
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    try:
        PageLayout(format, dim)
        if format.rotate:
            hadamard(dim)
    except LayerError as error:
        return str(error)
    return None


def hadamard(size: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """The normalized, symmetric Hadamard matrix [size, size], its own inverse; LayerError unless a power of two."""
    if size & (size - 1):
        raise LayerError(f"heads of {size} channels cannot be rotated: head_dim must be a power of two")
    return torch.Tensor.to(matrix(size, torch.float64), device, dtype)
