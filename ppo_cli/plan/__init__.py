"""What holds in a run: every setting decided, placement, batches, memory, and what is wrong.

Called, this package is the library's `plan`: `from ppo_cli import plan` gives either of the two.
"""

import sys

from ppo_cli import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
