"""`python -m scriptdispatch` is the command line; `dev` starts its parts this way."""

from scriptdispatch.cli.main import main

if __name__ == "__main__":
    main()
