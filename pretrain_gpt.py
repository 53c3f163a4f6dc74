"""The same program as pretrain.py, under the name that Megatron-LM's launch scripts use."""

import sys

from pretrain import main

if __name__ == "__main__":
    sys.exit(main())
