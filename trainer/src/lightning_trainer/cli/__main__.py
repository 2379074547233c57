"""`python -m lightning_trainer.cli`, the same as `lightning-rl`."""

from __future__ import annotations

from lightning_trainer.cli import main

if __name__ == "__main__":
    main()
