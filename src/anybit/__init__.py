"""anybit: large language models at any bit-width, at the speed the hardware allows.

Importing anybit touches no GPU, reads no environment variable and makes no folder.
"""

__version__ = "0.1.0"
