"""``python -m sparsify``: the command line, where its script is not on the path."""

from sparsify.cli import main

if __name__ == "__main__":
    main()
