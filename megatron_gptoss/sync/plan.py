"""Which tensors travel together.

In: sizes in bytes, in the order of the weight map. Out: buckets of names. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable


def plan_buckets(sizes: Iterable[tuple[str, int]], limit_bytes: int) -> list[list[str]]:
    """Consecutive names, up to `limit_bytes` a bucket; a tensor larger than the limit travels alone.

    Buckets bound what one transfer holds. (The inline transfer of today still puts all buckets into the object store at once.)
    """
    buckets: list[list[str]] = []
    used = 0
    for name, size in sizes:
        if not buckets or used + size > limit_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        used += size
    return buckets
