"""`python bench/stacks`: this part by itself."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import stacks
    from stacks import alone

    alone.main(stacks.TITLE, stacks.run)
