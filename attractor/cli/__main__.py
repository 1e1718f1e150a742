import sys

from attractor.cli import main

sys.exit(main())
