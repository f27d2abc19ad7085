"""`python -m pion.demo`."""

import sys

from pion.demo import main

sys.exit(main())
