"""The double as a program: python -S -E tests/fin_double -i input.json -o output.json"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from fin_double.fin import main

sys.exit(main(sys.argv[1:]))
