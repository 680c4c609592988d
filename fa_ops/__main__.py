"""`python -m fa_ops`: demo, doctor, warm, fuzz and bench."""

from fa_ops.cli import main

if __name__ == "__main__":
    main()
