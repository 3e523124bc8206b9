"""Turn one checkpoint into another, as `gptoss convert` does.

python tools/convert_checkpoint.py gpt-oss-20b gpt-oss-20b-megatron --to megatron --verify
"""

import sys

from megatron_gptoss.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()
