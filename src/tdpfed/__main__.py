"""``python -m tdpfed`` is the command line, also under ``torchrun``."""

from tdpfed.cli import main

if __name__ == "__main__":
    main()
