"""The commands `python -m fa_ops` and the script `fa-ops`."""

import sys


def main() -> None:
    """Run a command; if typer or rich are not installed, print a message and exit with status 2."""
    try:
        from fa_ops.cli import app

        app(prog_name="python -m fa_ops")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"the commands of fa_ops need typer and rich ({error}): pip install 'typer>=0.19' rich",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
