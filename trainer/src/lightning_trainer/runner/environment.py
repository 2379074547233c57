"""The part of a runner's environment that its agents get: what programs need, and what the user names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from lightning_spans.store.urls import PASSWORD, without_secrets

# What programs need to start, to find their files and to communicate: names and globs.
_NEEDED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "COLORTERM",
    "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TMPDIR", "TMP", "TEMP", "XDG_*_HOME", "XDG_RUNTIME_DIR",
    "SYSTEMROOT", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUTF8",
    "PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONASYNCIODEBUG", "PYTHONDEVMODE",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH",
    "NODE_PATH", "JAVA_HOME", "GOPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS", "NO_PROXY", "no_proxy", "CUDA_*", "NVIDIA_*", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMBA_*",
    "TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_*", "TRANSFORMERS_CACHE",
    "TRANSFORMERS_OFFLINE", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
    "LIGHTNING_BOUNDS", "LIGHTNING_SPOOL", "LIGHTNING_REDACT",
)  # fmt: skip
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})  # in upper or lower case
_OWN: Final = re.compile(r"LIGHTNING_(.*_)?KEY(_.*)?")  # keys of the runner, of upstreams, of the provider


def allowed_environment(environment: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of an agent under `lightning-rl runner`.

    Args:
        environment: the runner's.
        named: variables that the user wants passed: names, or globs such as ``MYAPP_*``. Our own keys never are: an
            agent gets the key of its attempt.
    """
    wanted = (*_NEEDED, *named)
    return {
        name: value
        for name, value in without_keys(environment).items()
        if any(fnmatchcase(name, each) for each in wanted) or (name.lower() in _PROXIES and not _has_password(value))
    }


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent that is trained from the user's own shell and machine: all but our keys."""
    return {
        name: value
        for name, value in environment.items()
        if not _OWN.fullmatch(name) and not (name == "LIGHTNING_STORE" and _has_password(value))
    }


def _has_password(url: str) -> bool:
    return PASSWORD.search(url) is not None or without_secrets(url) != url


def explain_missing_variables(error: str, environment: Mapping[str, str], passed: Mapping[str, str]) -> str:
    """Return an agent's error, preceded by the variables that it names and does not get.

    Args:
        error: the agent's error.
        environment: the runner's.
        passed: the part of it that the agent gets.
    """
    withheld = without_keys(environment).keys() - passed.keys()
    words = set(re.findall(r"[A-Z][A-Z0-9_]{2,}", error))
    missing = sorted(withheld & words)
    if not missing:
        return error
    names = ",".join(missing)
    verb = "is" if len(missing) == 1 else "are"
    return f"{names} {verb} set in the runner's shell and not passed to agents: add --pass-env {names}\n{error}"
