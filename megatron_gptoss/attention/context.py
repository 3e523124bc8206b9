"""Context parallelism: attention over one packed stream of which every rank of a group holds a piece.

In: this rank's queries, keys, values, the sinks, the whole stream's cu_seqlens and a process group (gloo or NCCL). Out: this rank's rows
of what `attend` gives for the whole stream, and its gradients. It makes no groups, cuts no batches and rotates nothing.

Sharding, everywhere: the packed stream of T tokens is cut into CP contiguous shards of equal length; rank r of the group holds tokens
r * T/CP .. (r + 1) * T/CP. cu_seqlens [S+1] is the whole stream's, from 0 to T, the same on every rank. Sequences are neither padded nor
dealt out in zigzag: a windowed layer then needs nothing but the window's keys from in front of the shard.

Sinks: counted once for every query. Each rank returns its own part of their gradient, and the SUM over the group is the gradient (ulysses:
the whole for the rank's own heads and zero for the others; halo and ring: over the rank's own queries).

Three ways for queries and keys to meet; `choose_method` is the rule:

halo     A window. A rank receives the at most window - 1 keys and values in front of its shard that its first sequence still sees: from
         one predecessor, or from several where shards are shorter. Queries that see their own shard only are computed meanwhile.
ulysses  Whole sequences of some heads: one all-to-all deals q, k and v out by heads, attention runs as on one GPU, another brings the
         output back. Every rank has the same work. Where ranks outnumber kv heads, several ranks get the same kv head and their gradients
         for it are summed.
ring     Whatever else. In step i a rank computes its queries against the keys of the rank i places before it, while those of step i + 1
         come in; parts are merged in float32 by their log-sum-exp. Keys come straight from their owner and gradients go straight back: a
         causal chain never goes round, handing on would cost the same bytes, and gradients that travel as float32 sums twice as many. With
         contiguous shards the last rank computes 2 - 1/CP times the average, so ulysses is preferred.

Every rank of the group has to make the same calls in the same order, backward too, and to use the log-sum-exp in its loss if one does.

Shape legend: T this rank's tokens (of the stream, in the text above), G = CP * T all tokens, H query heads, K kv heads, D head dim,
S sequences, N some tokens. Messages hold keys and values in one tensor [N, 2, K, D].
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_gptoss.attention.api import Backend, attend, check_arguments, find_backend, usual_arguments
from megatron_gptoss.attention.layout import Layout, self_attention_layout

METHODS = ("halo", "ulysses", "ring")


def attend_context(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sink_H: Tensor | None,
    *,
    group: ProcessGroup,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "reference",
    deterministic: bool = False,
    method: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` for this rank's shard of the stream; arguments and results as there, T being the shard's length.

    cu_seqlens: of the whole stream, integers [S+1] from 0 to CP * T, the same on every rank; None: all of it is one sequence.
    method: one of METHODS; None: what `choose_method` says. A group of one rank is `attend` itself.

    Raises ValueError for arguments that break a rule, before anything is sent, and MachineError for a backend that cannot run here.
    """
    check_arguments(q_THD, k_TKD, v_TKD, sink_H, window, scale)
    size, rank = group.size(), group.rank()
    num_heads, num_kv_heads = q_THD.shape[1], k_TKD.shape[1]
    if method is None:
        method = choose_method(num_heads, num_kv_heads, size, window)
    check_method(method, num_heads, num_kv_heads, size, window)
    if size == 1:
        options: dict[str, Any] = {"scale": scale, "backend": backend, "deterministic": deterministic}
        return attend(q_THD, k_TKD, v_TKD, sink_H, cu_seqlens=cu_seqlens, window=window, **options)

    if backend == "te" and method != "ulysses":  # said here, since only the ranks that see other ranks' keys would find out
        raise ValueError(f"backend = 'te' cannot put other ranks' keys in front, as method = {method!r} does; use 'triton' or 'flash'")
    stream = _stream_layout(cu_seqlens, q_THD, rank, size)
    chosen = find_backend(backend, q_THD, deterministic=deterministic)
    sink_H, window, scale = usual_arguments(q_THD, sink_H, window, scale)
    how = _How(group, window, scale, chosen, deterministic)
    _introduce(group, q_THD.device)
    if method == "ulysses":
        return _Ulysses.apply(q_THD, k_TKD, v_TKD, sink_H, stream, how)  # pyright: ignore[reportReturnType]
    shard = _shard(stream, rank, size, window)
    one_way = _Halo if method == "halo" else _Ring
    return one_way.apply(q_THD, k_TKD, v_TKD, sink_H, shard, how)  # pyright: ignore[reportReturnType]


def choose_method(num_heads: int, num_kv_heads: int, size: int, window: int | None) -> str:
    """halo for a window, else ulysses where the heads can be dealt out to `size` ranks, else ring.

    GPT-OSS (64 / 8 heads) without tensor parallelism: ulysses up to 64 ranks whose number is a power of two.
    """
    if window is not None:
        return "halo"
    return "ulysses" if _heads_can_be_dealt(num_heads, num_kv_heads, size) else "ring"


def check_method(method: str, num_heads: int, num_kv_heads: int, size: int, window: int | None) -> None:
    """Raises ValueError when that method cannot compute this layer on `size` ranks."""
    if method not in METHODS:
        raise ValueError(f"method = {method!r} is unknown; one of {', '.join(METHODS)}, or None for the one that fits")
    if method == "halo" and window is None:
        raise ValueError("method = 'halo' sends a window's keys and this layer has no window; use 'ulysses' or 'ring'")
    if method == "ring" and window is not None:
        raise ValueError(f"method = 'ring' computes layers without a window and window = {window}; use 'halo' or 'ulysses'")
    if method == "ulysses" and not _heads_can_be_dealt(num_heads, num_kv_heads, size):
        works = [n for n in range(1, num_heads + 1) if _heads_can_be_dealt(num_heads, num_kv_heads, n)]
        raise ValueError(
            f"method = 'ulysses' cannot deal {num_heads} query heads over {num_kv_heads} kv heads out to {size} ranks. "
            f"Numbers of ranks that work: {', '.join(map(str, works))}; {'halo' if window is not None else 'ring'!r} takes any."
        )


def _heads_can_be_dealt(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Whole kv heads for every rank, or one kv head for each rank's query heads."""
    return num_kv_heads % size == 0 or (num_heads % size == 0 and size % num_kv_heads == 0)


def shard_rows(num_tokens: int, rank: int, size: int) -> slice:
    """The tokens of the stream that a rank holds. Raises ValueError when `size` shards of equal length are impossible."""
    if num_tokens % size:
        raise ValueError(
            f"T = {num_tokens} packed tokens cannot be cut into {size} equal shards (context parallel size CP = {size}); "
            f"{num_tokens - num_tokens % size} or {num_tokens + size - num_tokens % size} tokens could"
        )
    length = num_tokens // size
    return slice(rank * length, (rank + 1) * length)


# --- What is sent -----------------------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What this rank has handed to torch.distributed for other ranks; what an all-to-all leaves on the rank itself is not counted."""

    bytes: int = 0
    messages: int = 0  # a collective is one

    def count(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.messages += 1


traffic = Traffic()


@dataclass(frozen=True)
class LayerBytes:
    forward: int
    backward: int


def bytes_sent_per_layer(
    method: str,
    *,
    rank: int,
    size: int,
    bounds: tuple[int, ...],  # the whole stream's cu_seqlens
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,  # of q, k and v
    window: int | None = None,
    uses_lse: bool = False,
) -> LayerBytes:
    """What one rank sends for one layer, by the rules of this file: halo and ring send k and v of the rows that others see, once forward;
    the ring again backward; gradients go back in k's dtype. Ulysses sends all but 1/CP of q, k, v one way and of the output the other."""
    length = shard_rows(bounds[-1], 0, size).stop
    if method == "ulysses":
        elsewhere = (size - 1) * length  # rows of one rank's heads that other ranks hold
        heads, kv_heads = num_heads // size, max(num_kv_heads // size, 1)
        qkv = elsewhere * (heads + 2 * kv_heads) * head_dim * itemsize
        out = elsewhere * heads * head_dim * itemsize
        lse = elsewhere * heads * max(itemsize, 4)
        return LayerBytes(forward=qkv + out + lse, backward=out + uses_lse * lse + qkv)
    row = 2 * num_kv_heads * head_dim * itemsize
    keys = row * sum(rows_seen(bounds, length, window, rank, reader) for reader in range(rank + 1, size))
    gradients = row * sum(rows_seen(bounds, length, window, owner, rank) for owner in range(rank))
    return LayerBytes(forward=keys, backward=gradients + (keys if method == "ring" else 0))


def rows_seen(bounds: tuple[int, ...], length: int, window: int | None, owner: int, reader: int) -> int:
    """How many keys of an earlier rank's shard a later rank's queries see: always its last ones, since only the sequence that runs into the
    reader's shard reaches back, and its first query farthest. Both sides know it from cu_seqlens alone."""
    query = reader * length
    if query >= bounds[-1]:
        return 0  # no tokens at all
    first_key = bounds[bisect_right(bounds, query) - 1]
    if window is not None:
        first_key = max(first_key, query - window + 1)
    return max((owner + 1) * length - max(first_key, owner * length), 0)


# --- What each rank computes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _How:
    """The arguments of a call that are no tensors."""

    group: ProcessGroup
    window: int | None
    scale: float
    backend: Backend
    deterministic: bool

    def forward(self, q_THD: Tensor, *tensors: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """tensors: k, v, sink."""
        return self.backend.forward(q_THD, *tensors, layout, self.window, self.scale)

    def backward(self, dout_THD: Tensor, *tensors: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """tensors: dlse, q, k, v, sink, out, lse."""
        return self.backend.backward(dout_THD, *tensors, layout, self.window, self.scale, self.deterministic)


@dataclass(frozen=True)
class _Shard:
    """One rank's place in the stream: what it exchanges and which attentions it computes, for one window."""

    rank: int
    size: int
    readers: dict[int, int]  # later rank -> how many of our last keys it sees
    owners: dict[int, int]  # earlier rank -> how many of its last keys we see, in the order of the stream
    local: Layout  # our queries and our keys
    crossing: int  # our queries that see other ranks' keys, 0 without owners; always the first ones
    head: Layout  # halo: those queries, and all the others' keys in front of their own
    rectangles: dict[int, Layout]  # ring: those queries and the keys of one owner, all visible

    @property
    def num_halo(self) -> int:
        return sum(self.owners.values())


_shards: WeakKeyDictionary[Layout, dict[tuple[int, int, int | None], _Shard]] = WeakKeyDictionary()


def _shard(stream: Layout, rank: int, size: int, window: int | None) -> _Shard:
    """Made once per stream and window, not once per layer: kernels read tables that the layouts keep."""
    known = _shards.setdefault(stream, {})
    if (rank, size, window) not in known:
        known[rank, size, window] = _make_shard(stream.bounds, rank, size, window, stream.device)
    return known[rank, size, window]


def _make_shard(bounds: tuple[int, ...], rank: int, size: int, window: int | None, device: torch.device) -> _Shard:
    rows = shard_rows(bounds[-1], rank, size)
    length = rows.stop - rows.start
    seen = {owner: rows_seen(bounds, length, window, owner, rank) for owner in range(rank)}
    asked = {reader: rows_seen(bounds, length, window, rank, reader) for reader in range(rank + 1, size)}
    owners, readers = ({peer: n for peer, n in by_peer.items() if n} for by_peer in (seen, asked))

    inner = {bound - rows.start for bound in bounds if rows.start < bound < rows.stop}
    local_bounds = sorted({0, length} | inner) if length else [0, 0]
    crossing = 0
    if owners:  # the first sequence, and of it the queries whose window reaches out of the shard
        crossing = local_bounds[1] if window is None else min(local_bounds[1], window - 1)
    return _Shard(
        rank,
        size,
        readers,
        owners,
        Layout(tuple(local_bounds), device=device),
        crossing,
        Layout((0, crossing), offset=sum(owners.values()), device=device),
        {owner: Layout((0, crossing), offset=n - crossing, causal=False, device=device) for owner, n in owners.items()},
    )


def _stream_layout(cu_seqlens: Tensor | None, q_THD: Tensor, rank: int, size: int) -> Layout:
    length = q_THD.shape[0]
    try:
        return self_attention_layout(cu_seqlens, length * size, q_THD.device)
    except ValueError as error:
        if cu_seqlens is None or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
            raise
        total = int(cu_seqlens[-1])
        rows = shard_rows(total, rank, size)
        if rows.stop - rows.start != length:
            raise ValueError(
                f"cu_seqlens ends at T = {total}, so each of CP = {size} ranks holds {total // size} tokens, and q_THD of rank {rank} has "
                f"{length}; cu_seqlens must be the whole stream's and q, k, v this rank's shard"
            ) from error
        raise


# --- Halo -------------------------------------------------------------------------------------------------------------------------------


class _Halo(torch.autograd.Function):
    """Two attentions: all queries over their own shard, which needs nobody, then the few first ones again with the halo in front.

    The first computes those few queries in vain, but a kernel writes a whole output, and cutting it out of one would cost a pass over it.
    Where all queries of a shard see the halo, only the second one runs.
    """

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, shard: _Shard, how: _How
    ) -> tuple[Tensor, Tensor]:
        first, halo = slice(0, shard.crossing), slice(0, shard.num_halo)
        near_N2KD = k_TKD.new_empty(shard.num_halo + shard.crossing, 2, *k_TKD.shape[1:])
        messages = _Messages(_to_readers(k_TKD, v_TKD, shard), _by_owner(near_N2KD[halo], shard), how.group)
        near_N2KD[shard.num_halo :, 0], near_N2KD[shard.num_halo :, 1] = k_TKD[first], v_TKD[first]
        ctx.apart = shard.crossing < q_THD.shape[0] or not shard.owners
        if ctx.apart:
            out_THD, lse_TH = how.forward(q_THD, k_TKD, v_TKD, sink_H, layout=shard.local)
            messages.wait()
            if shard.owners:
                out_THD[first], lse_TH[first] = how.forward(q_THD[first], *near_N2KD.unbind(1), sink_H, layout=shard.head)
        else:
            messages.wait()
            out_THD, lse_TH = how.forward(q_THD, *near_N2KD.unbind(1), sink_H, layout=shard.head)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH, near_N2KD)
        ctx.shard, ctx.how = shard, how
        ctx.set_materialize_grads(False)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor | None, dlse_TH: Tensor | None) -> tuple[Tensor | None, ...]:
        """The halo's gradients first: they travel during the rest. Fed the final output and log-sum-exp, the attention over the shard's own
        keys gives their whole gradients and the sinks'; only dq of the first queries is incomplete there."""
        q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH, near_N2KD = ctx.saved_tensors
        shard, how, first, halo = ctx.shard, ctx.how, slice(0, ctx.shard.crossing), slice(0, ctx.shard.num_halo)
        dout_THD = torch.zeros_like(out_THD) if dout_THD is None else dout_THD
        head = None
        if shard.owners:
            dlse_NH = None if dlse_TH is None else dlse_TH[first]
            head_sink = None if ctx.apart else sink_H
            near = (q_THD[first], *near_N2KD.unbind(1), head_sink, out_THD[first], lse_TH[first])
            head = how.backward(dout_THD[first], dlse_NH, *near, layout=shard.head)
        gradients = {} if head is None else _by_owner(_pair(head[1][halo], head[2][halo]), shard)
        messages = _Messages(gradients, _room_for_readers(k_TKD, shard), how.group)
        if head is None or ctx.apart:
            mine = (dout_THD, dlse_TH, q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH)
            dq_THD, dk_TKD, dv_TKD, dsink_H = how.backward(*mine, layout=shard.local)
            if head is not None:
                dq_THD[first] = head[0]
        else:
            dq_THD, dk_TKD, dv_TKD, dsink_H = head[0], head[1][shard.num_halo :], head[2][shard.num_halo :], head[3]
        total = _Total(dk_TKD, dv_TKD, shard)
        total.add(messages.wait())
        total.write()
        return dq_THD, dk_TKD, dv_TKD, dsink_H, None, None


# --- Ulysses ----------------------------------------------------------------------------------------------------------------------------


class _Ulysses(torch.autograd.Function):
    """All tokens of H / CP query heads and of the kv heads that these read. What arrived is what backward needs, so nothing is kept twice.

    Computing does not overlap with the all-to-alls. For GPT-OSS on two H200 at 65,536 tokens a rank sends 0.6 GB a layer, forward and
    backward; at NCCL's 261 GB/s that takes 2 % of the kernels' 117 ms. (Computed from the two rates, which were measured apart.)
    """

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, stream: Layout, how: _How
    ) -> tuple[Tensor, Tensor]:
        size = how.group.size()
        heads, kv_heads = q_THD.shape[1] // size, max(k_TKD.shape[1] // size, 1)
        ctx.parts, ctx.num_kv_heads = (heads, kv_heads, kv_heads), k_TKD.shape[1]
        ctx.own = slice(how.group.rank() * heads, (how.group.rank() + 1) * heads)
        dealt = torch.cat([_deal(x, n, size) for x, n in zip((q_THD, k_TKD, v_TKD), ctx.parts, strict=True)], dim=2)
        qkv_GND = _AllToAll(dealt, how.group).wait().flatten(0, 1)
        own_sink = None if sink_H is None else sink_H[ctx.own]
        out_GHD, lse_GH = how.forward(*qkv_GND.split(ctx.parts, dim=1), own_sink, layout=stream)
        out, lse = (_AllToAll(x.unflatten(0, (size, q_THD.shape[0])), how.group) for x in (out_GHD, lse_GH))
        ctx.save_for_backward(qkv_GND, sink_H, out_GHD, lse_GH)
        ctx.stream, ctx.how = stream, how
        ctx.set_materialize_grads(False)
        return _collect(out.wait(), q_THD.shape[1]), _collect(lse.wait(), q_THD.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor | None, dlse_TH: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv_GND, sink_H, out_GHD, lse_GH = ctx.saved_tensors
        how, size, heads = ctx.how, ctx.how.group.size(), ctx.parts[0]
        dout, dlse = (None if x is None else _AllToAll(_deal(x, heads, size), how.group) for x in (dout_THD, dlse_TH))
        dout_GHD = torch.zeros_like(out_GHD) if dout is None else dout.wait().flatten(0, 1)
        dlse_GH = None if dlse is None else dlse.wait().flatten(0, 1)
        own_sink = None if sink_H is None else sink_H[ctx.own]
        mine = (dout_GHD, dlse_GH, *qkv_GND.split(ctx.parts, dim=1), own_sink, out_GHD, lse_GH)
        *gradients, own_dsink = how.backward(*mine, layout=ctx.stream)
        messages = _AllToAll(torch.cat(gradients, dim=1).unflatten(0, (size, len(out_GHD) // size)), how.group)
        dsink_H = None
        if sink_H is not None:
            dsink_H = torch.zeros_like(sink_H)
            dsink_H[ctx.own] = own_dsink
        dq, dk, dv = messages.wait().split(ctx.parts, dim=2)
        return _collect(dq, heads * size), _collect(dk, ctx.num_kv_heads), _collect(dv, ctx.num_kv_heads), dsink_H, None, None


def _deal(x: Tensor, heads: int, size: int) -> Tensor:
    """[T, all heads, ...] -> [CP, T, heads, ...], the heads of every rank: a view, unless several ranks read the same heads."""
    blocks = x.unflatten(1, (x.shape[1] // heads, heads)).transpose(0, 1)
    return blocks if len(blocks) == size else blocks.repeat_interleave(size // len(blocks), dim=0)


def _collect(x: Tensor, num_heads: int) -> Tensor:
    """[CP, T, heads, ...] -> [T, num_heads, ...], undoing `_deal`: what several ranks give for one head is summed, in float32 or better."""
    copies = x.shape[0] * x.shape[2] // num_heads
    if copies > 1:
        x = x.unflatten(0, (x.shape[0] // copies, copies)).sum(1, dtype=_compute_dtype(x)).to(x.dtype)
    return x.transpose(0, 1).flatten(1, 2)


# --- Ring -------------------------------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """The shard's own keys, with whole sequences, causality and the sinks; then one rectangle for every earlier shard that is seen."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, sink_H: Tensor | None, shard: _Shard, how: _How
    ) -> tuple[Tensor, Tensor]:
        first = slice(0, shard.crossing)
        pieces = _pieces(k_TKD, v_TKD, shard, how.group)
        # The sinks belong to exactly one part, and this is the one that every query has.
        out_THD, lse_TH = how.forward(q_THD, k_TKD, v_TKD, sink_H, layout=shard.local)
        sum_NHD = out_THD[first].to(_compute_dtype(out_THD))
        for step, piece_N2KD in pieces:
            if piece_N2KD is not None:
                seen = (q_THD[first], *piece_N2KD.unbind(1), None)
                merge_(sum_NHD, lse_TH[first], *how.forward(*seen, layout=shard.rectangles[shard.rank - step]))
        if shard.owners:
            out_THD[first] = sum_NHD
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH)
        ctx.shard, ctx.how = shard, how
        ctx.set_materialize_grads(False)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor | None, dlse_TH: Tensor | None) -> tuple[Tensor | None, ...]:
        """Every part is fed the final output and log-sum-exp, which makes its gradients terms of a plain sum."""
        q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH = ctx.saved_tensors
        shard, how, first = ctx.shard, ctx.how, slice(0, ctx.shard.crossing)
        dout_THD = torch.zeros_like(out_THD) if dout_THD is None else dout_THD
        dlse_NH = None if dlse_TH is None else dlse_TH[first]
        pieces = _pieces(k_TKD, v_TKD, shard, how.group)
        mine = (dout_THD, dlse_TH, q_THD, k_TKD, v_TKD, sink_H, out_THD, lse_TH)
        dq_THD, dk_TKD, dv_TKD, dsink_H = how.backward(*mine, layout=shard.local)
        sum_NHD, total = dq_THD[first].to(_compute_dtype(dq_THD)), _Total(dk_TKD, dv_TKD, shard)
        returning = _Messages({}, {}, how.group)
        for step, piece_N2KD in pieces:
            owner, reader = shard.rank - step, shard.rank + step
            sends: dict[int, Tensor] = {}
            if piece_N2KD is not None:
                seen = (q_THD[first], *piece_N2KD.unbind(1), None, out_THD[first], lse_TH[first])
                part_NHD, dk_NKD, dv_NKD, _ = how.backward(dout_THD[first], dlse_NH, *seen, layout=shard.rectangles[owner])
                sum_NHD += part_NHD
                sends[owner] = _pair(dk_NKD, dv_NKD)
            total.add(returning.wait())
            returning = _Messages(sends, _room_for_readers(k_TKD, shard, only=reader), how.group)
        total.add(returning.wait())
        total.write()
        if shard.owners:
            dq_THD[first] = sum_NHD
        return dq_THD, dk_TKD, dv_TKD, dsink_H, None, None


def _pieces(k_TKD: Tensor, v_TKD: Tensor, shard: _Shard, group: ProcessGroup) -> Iterator[tuple[int, Tensor | None]]:
    """(step, keys and values that we see of the rank `step` places before us, if any). The next step's are always on their way, step 1's
    from this call on."""
    ours = _to_readers(k_TKD, v_TKD, shard)

    def start(step: int) -> _Messages:
        reader, owner = shard.rank + step, shard.rank - step
        room = {owner: k_TKD.new_empty(shard.owners[owner], 2, *k_TKD.shape[1:])} if owner in shard.owners else {}
        return _Messages({reader: ours[reader]} if reader in ours else {}, room, group)

    def steps(coming: _Messages) -> Iterator[tuple[int, Tensor | None]]:
        for step in range(1, shard.size):
            arrived = coming.wait()
            coming = start(step + 1)
            yield step, arrived.get(shard.rank - step)

    return steps(start(1))


def merge_(out_NHD: Tensor, lse_NH: Tensor, part_NHD: Tensor, part_NH: Tensor) -> None:
    """Two attentions of the same queries over different keys become that over all of them, in the place of the first.

    A part in which a query sees nothing (log-sum-exp -inf) adds nothing, also when both are such.
    """
    share_NH = torch.sigmoid(part_NH - lse_NH).masked_fill_(part_NH == -torch.inf, 0.0)
    out_NHD.lerp_(part_NHD.to(out_NHD.dtype), share_NH.unsqueeze(-1))
    torch.logaddexp(lse_NH, part_NH, out=lse_NH)


# --- Transport --------------------------------------------------------------------------------------------------------------------------


class _Messages:
    """Point-to-point messages under way, by the peer's rank in the group. `wait` returns what arrived; on a GPU only the stream waits."""

    def __init__(self, sends: dict[int, Tensor], receives: dict[int, Tensor], group: ProcessGroup) -> None:
        self._sends, self._receives = sends, receives  # kept until they have left
        operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends.items()]
        operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in receives.items()]
        self._works = dist.batch_isend_irecv(operations) if operations else []
        for x in sends.values():
            traffic.count(x.numel() * x.element_size())

    def wait(self) -> dict[int, Tensor]:
        for work in self._works:
            work.wait()
        return self._receives


class _AllToAll:
    """[CP, ...] under way: part i goes to rank i. `wait` returns [CP, ...], part i from rank i."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        self._send = x.contiguous()
        self._received = torch.empty_like(self._send)
        self._work = dist.all_to_all_single(self._received, self._send, group=group, async_op=True)
        traffic.count(x[1:].numel() * x.element_size())

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received


class _Total:
    """Sums what other ranks return for our last keys, in float32 or better and always in the same order."""

    def __init__(self, dk_TKD: Tensor, dv_TKD: Tensor, shard: _Shard) -> None:
        rows = max(shard.readers.values(), default=0)
        self._dk_NKD, self._dv_NKD = (x[x.shape[0] - rows :] for x in (dk_TKD, dv_TKD))
        self._sum_N2KD = _pair(self._dk_NKD, self._dv_NKD).to(_compute_dtype(dk_TKD))

    def add(self, pieces: dict[int, Tensor]) -> None:
        for piece_N2KD in pieces.values():
            self._sum_N2KD[len(self._sum_N2KD) - len(piece_N2KD) :] += piece_N2KD

    def write(self) -> None:
        if len(self._sum_N2KD):
            self._dk_NKD.copy_(self._sum_N2KD[:, 0])
            self._dv_NKD.copy_(self._sum_N2KD[:, 1])


def _pair(k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
    """[N, 2, K, D]: any of its row ranges is one contiguous message."""
    return torch.stack((k_NKD, v_NKD), dim=1)


def _to_readers(k_TKD: Tensor, v_TKD: Tensor, shard: _Shard) -> dict[int, Tensor]:
    """Our last keys and values for everyone who sees some of them, packed once for all."""
    rows = max(shard.readers.values(), default=0)
    if not rows:
        return {}
    pair_N2KD = _pair(k_TKD[k_TKD.shape[0] - rows :], v_TKD[v_TKD.shape[0] - rows :])
    return {reader: pair_N2KD[rows - n :] for reader, n in shard.readers.items()}


def _by_owner(halo_N2KD: Tensor, shard: _Shard) -> dict[int, Tensor]:
    """The rows of a halo that belong to each earlier rank; views."""
    return dict(zip(shard.owners, halo_N2KD.split(list(shard.owners.values())), strict=True)) if shard.owners else {}


def _room_for_readers(k_TKD: Tensor, shard: _Shard, only: int | None = None) -> dict[int, Tensor]:
    """Where later ranks' gradients for our last keys arrive."""
    return {r: k_TKD.new_empty(n, 2, *k_TKD.shape[1:]) for r, n in shard.readers.items() if only is None or r == only}


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_introduced: WeakSet[ProcessGroup] = WeakSet()


def _introduce(group: ProcessGroup, device: torch.device) -> None:
    """NCCL builds a group's communicator at its first use, which needs every rank; messages may be between two of them only."""
    if device.type == "cuda" and group not in _introduced:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _introduced.add(group)
