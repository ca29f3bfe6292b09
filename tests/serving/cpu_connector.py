"""vLLM's example connector, which keeps prompts' KV in files, made to work on the CPU: whole blocks are copied.

The CPU's attention packs keys within a block in its own way, so that single slots cannot be copied as the example does;
and the example loads to a GPU.
"""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class CpuConnector(ExampleConnector):
    """Saves and loads the KV of a prompt's full blocks.

    Attributes:
        fails_every: every so manieth load fails at its middle block; 0: none does.
        num_saves, num_loads: requests that were saved (counted once a layer) and loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fails_every = 0
        self.num_saves = self.num_loads = 0
        self._failed_block_ids: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        # The example forgets that the prefix cache may have more than it.
        return max(0, num_tokens or 0), is_async

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for request in metadata.requests:
            if not request.is_store:
                self._load(request, forward_context)

    def _load(self, request: Any, forward_context: Any) -> None:
        self.num_loads += 1
        block_ids = self._block_ids(request)
        failed = None
        if self.fails_every and self.num_loads % self.fails_every == 0:
            failed = len(block_ids) // 2
            self._failed_block_ids.add(int(block_ids[failed]))
        for layer_name, layer in forward_context.no_compile_layers.items():
            caches = getattr(layer, "kv_cache", None)
            if caches is None:
                continue
            filename = self._generate_filename_debug(layer_name, request.token_ids, request.mm_hashes)
            saved = safetensors.torch.load_file(filename)["kv_cache"]
            if failed is not None:
                saved[:, failed] = 0
            caches[forward_context.virtual_engine][:, block_ids] = saved

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for request in metadata.requests:
            if request.is_store:
                self.num_saves += 1
                filename = self._generate_filename_debug(layer_name, request.token_ids, request.mm_hashes)
                blocks = kv_layer[:, self._block_ids(request)].clone()
                safetensors.torch.save_file({"kv_cache": blocks}, filename)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def _block_ids(self, request: Any) -> torch.Tensor:
        return request.slot_mapping[:: self._block_size] // self._block_size
