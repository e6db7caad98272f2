"""``python -m tensorwire.launch`` is ``rpcrun``."""

from tensorwire.launch.main import main

if __name__ == "__main__":
    main()
