"""Models that need no hub: made from an installed package or a fixed seed, cached, checked by checksum."""
