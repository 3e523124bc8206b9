"""How the [N, V] logits are cut into tiles that fit one buffer.

In: sizes. Out: row and column slices. Pure; no tensors.

Columns (vocabulary) are cut before rows (tokens): a tile that holds all tokens gives its part of the matrix's gradient in one product, with
one rounding, and what must be added up over tiles in float32 is the hidden states' gradient, [N, C]. Cut by tokens it would be the
matrix's, [V, C]: 2.3 GB for GPT-OSS. Rows are cut only where columns would become too few for an efficient product.

Shape legend: N predicted tokens, V vocabulary of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BYTES = 2_000_000_000  # of logits at once: for GPT-OSS and 24,576 tokens a fifth of all of them
FEWEST_COLUMNS = 4096  # narrower products leave tensor cores waiting for memory
ALIGNED_COLUMNS = 128  # rows of a tile begin at whole cache lines


@dataclass(frozen=True)
class Tiles:
    """Every pair of a row slice and a column slice is a tile. The first of each may be smaller than the others."""

    rows: tuple[slice, ...]
    columns: tuple[slice, ...]

    @property
    def largest(self) -> int:
        """Logits of the largest tile, which is the last."""
        rows, columns = self.rows[-1], self.columns[-1]
        return (rows.stop - rows.start) * (columns.stop - columns.start)


def default_chunk(V: int, itemsize: int, limit_bytes: int = DEFAULT_BYTES) -> int:
    """Tokens whose logits, V of `itemsize` bytes each, fill `limit_bytes`; at least 1."""
    return max(1, limit_bytes // (V * itemsize))


def plan_tiles(N: int, V: int, chunk: int, fewest_columns: int = FEWEST_COLUMNS) -> Tiles:
    """Tiles of at most chunk * V logits: never more than those of `chunk` whole tokens."""
    columns = min(V, max(chunk * V // max(N, 1), min(fewest_columns, V)))
    if ALIGNED_COLUMNS < columns < V:
        columns -= columns % ALIGNED_COLUMNS
    return Tiles(_cut(N, chunk * V // columns), _cut(V, columns))


def _cut(length: int, step: int) -> tuple[slice, ...]:
    """0..length in steps, what is left over first: the last, whose logits backward finds still there, is then a whole one."""
    begins = [0, *range(length % step or min(step, length), length, step)]
    return tuple(slice(a, b) for a, b in zip(begins, [*begins[1:], length], strict=True))
