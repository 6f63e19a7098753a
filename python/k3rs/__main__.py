"""`python -m k3rs` is the `k3rs` command."""

import sys

from k3rs.cli.main import main

sys.exit(main())
