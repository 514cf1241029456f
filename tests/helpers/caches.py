"""Arguments of caches, given flat."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import attnmesh as am


def cache_sizes(**given: Any) -> dict[str, Any]:
    """The arguments of a `BlockCache` or `ShardedCache`, with the fields of its `CacheSpec` among them."""
    names = {field.name for field in fields(am.CacheSpec)} & given.keys()
    return {"spec": am.CacheSpec(**{name: given.pop(name) for name in names}), **given}
