"""A third party's module that ends the process while it is imported."""

import sys

sys.exit(0)
