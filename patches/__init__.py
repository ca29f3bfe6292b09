"""The patches for forks of vLLM, and the register that says why each is there. `kvplug patch` reads them."""
