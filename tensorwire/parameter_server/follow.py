"""``python -m tensorwire.parameter_server.follow FOLDER``: prints, checks and compacts versions.

Only a program; the function ``follow`` is ``following.model``'s.
"""

import sys

from tensorwire.parameter_server.following.command import main

if __name__ == "__main__":
    sys.exit(main())
