"""`python3 -m pdlab COMMAND`: on a bare machine, sets the environment up first.

This file is read by whatever Python is there: it keeps to a syntax that old ones understand.
"""

import sys

LOWEST, HIGHEST = (3, 11), (3, 13)


def main() -> None:
    """Run the command of sys.argv, in an environment that has what it needs."""
    if not LOWEST <= tuple(sys.version_info[:2]) <= HIGHEST:
        sys.exit(
            f"pdlab: Python 3.11 to 3.13 is needed and {sys.executable} is {sys.version.split()[0]}: "
            "run it with one of those, as in `python3.11 -m pdlab ...`"
        )
    from pdlab.setup.bootstrap import prepare

    prepare(sys.argv[1:])
    from pdlab import cli

    sys.exit(cli.main())


if __name__ == "__main__":
    main()
