"""Types of the public names of tsae.rl."""

from .callback import TsaeCallback as TsaeCallback
from .run_log import RunLog as RunLog
