"""Errors of a Tinker server, with advice."""

from __future__ import annotations

from typing import Final

from lightning_trainer.engines.contract import EngineError

PAIRS: Final = (
    "SkyRL 0.4.0 works with tinker 0.25 (run: pip install 'tinker>=0.25,<0.26'); the hosted service asks for tinker"
    " 0.30.1 or later"
)
_LINE: Final = 300  # characters of a server's message


class TinkerError(EngineError):
    """A Tinker server is down, refuses a request, or sends something impossible.

    Attributes:
        refused: whether it refused the request itself, with a status from 400 to 499.
    """

    refused = False


def explain(error: BaseException, doing: str, url: str) -> TinkerError:
    """Return a readable error for a failed request.

    Args:
        error: what the SDK raised.
        doing: what the server was asked to do, after "to".
        url: of the server.
    """
    message = " ".join(str(error).split())[:_LINE] or type(error).__name__
    status = getattr(error, "status_code", None)
    told = TinkerError(f"the Tinker server {url} failed to {doing}: {message}.{_advice(status, message, error)}")
    told.refused = isinstance(status, int) and 400 <= status < 500
    return told


def _advice(status: int | None, message: str, error: BaseException) -> str:
    """Return what to do about an error; empty if unknown."""
    low = message.lower()
    mismatch = isinstance(error, AssertionError | AttributeError | TypeError) or "proto response" in low
    cases = (
        (mismatch, f"The SDK and the server do not match: {PAIRS}."),
        (
            status in (401, 403) or "api_key" in low or "unauthorized" in low,
            "Set TINKER_API_KEY to a key of this server.",
        ),
        (status == 402 or "billing" in low, "Look at the account's balance, then continue with --resume."),
        (
            "maximum number of lora" in low,
            (
                "Adapters of a program that was killed stay for some minutes (5 on SkyRL): wait, or start the server"
                " with a larger max_lora_adapters."
            ),
        ),
        (
            status == 404 or "not found" in low or "not loaded" in low,
            "The server no longer has this adapter or checkpoint. Continue from the last one with --resume.",
        ),
        ("rank" in low, "Choose another --lora-rank."),
    )
    return next((f" {advice}" for applies, advice in cases if applies), "")
