"""`python -m tune_study`. Any Python that can read this says in one line what it lacks."""

import sys

SUPPORTED = ((3, 11), (3, 13))


def _refuse(line):  # type: ignore[no-untyped-def]
    sys.stderr.write(line + "\n")
    sys.exit(2)


if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
    _refuse(
        "Python {}.{}: not supported. Use 3.11, 3.12 or 3.13: make PYTHON=python3.12".format(
            *sys.version_info[:2]
        )
    )
try:
    from tune_study.cli import main
except ModuleNotFoundError as error:
    _refuse("{}: not installed in {}. Run: make sweep".format(error.name, sys.executable))  # noqa: UP032

main()
