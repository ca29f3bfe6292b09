"""KV cache groups, one class for each kind of attention."""

from __future__ import annotations

from vllm_kvplug.geometry import AttentionKind
from vllm_kvplug.groups.base import AttentionGroup
from vllm_kvplug.groups.full_attention import FullAttentionGroup

GROUP_CLASSES: dict[AttentionKind, type[AttentionGroup]] = {
    AttentionKind.FULL: FullAttentionGroup,
    AttentionKind.MLA: FullAttentionGroup,
}
