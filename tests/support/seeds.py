"""The seed of the tests that make random SQL. It is always the same one, so that the suite always asks the same questions.

CDCPIPE_TEST_SEED names another one, and ``scripts/soak`` draws new ones all the time.
"""

import os

SEED = int(os.environ.get("CDCPIPE_TEST_SEED", "101"))
