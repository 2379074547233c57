"""Starts the scripted server: forked from the process at SCRIPTED_WARM, or without one by importing all it needs."""

import os
import sys

if __name__ == "__main__":
    if "SCRIPTED_WARM" in os.environ:
        from vllm.warm import run_forked

        run_forked(os.environ["SCRIPTED_WARM"], sys.argv[1:])
    else:
        from vllm.entrypoints.openai.scripted import main

        main()
