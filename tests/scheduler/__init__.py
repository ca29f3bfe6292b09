"""vLLM's real scheduler with fake model outputs and both managers.

`fake_worker` keeps the memory that a GPU would hold, so that a wrong block shows as wrong content.
"""
