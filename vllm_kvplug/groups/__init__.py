"""KV cache groups, one class for each kind of attention."""

from __future__ import annotations

from vllm_kvplug.geometry import AttentionKind, GroupGeometry, MambaMode
from vllm_kvplug.groups.base import AttentionGroup
from vllm_kvplug.groups.chunked_local import ChunkedLocalGroup
from vllm_kvplug.groups.cross_attention import CrossAttentionGroup
from vllm_kvplug.groups.full_attention import FullAttentionGroup
from vllm_kvplug.groups.mamba import AlignedMambaGroup, MambaGroup
from vllm_kvplug.groups.sliding_window import SlidingWindowGroup

_GROUP_CLASSES: dict[AttentionKind, type[AttentionGroup]] = {
    AttentionKind.FULL: FullAttentionGroup,
    AttentionKind.MLA: FullAttentionGroup,
    AttentionKind.SINK: FullAttentionGroup,
    AttentionKind.SLIDING_WINDOW: SlidingWindowGroup,
    AttentionKind.CHUNKED_LOCAL: ChunkedLocalGroup,
    AttentionKind.MAMBA: MambaGroup,
    AttentionKind.CROSS: CrossAttentionGroup,
}


def group_class(geometry: GroupGeometry) -> type[AttentionGroup]:
    """The class that serves a group of this geometry."""
    if geometry.kind is AttentionKind.MAMBA and geometry.mamba_mode is MambaMode.ALIGN:
        return AlignedMambaGroup
    return _GROUP_CLASSES[geometry.kind]
