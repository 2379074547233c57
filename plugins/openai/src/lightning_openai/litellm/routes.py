"""Where LiteLLM's calls go: to a policy, in a replay to the gateway first, or to the program's endpoint.

Calls to a gateway use LiteLLM's provider ``openai``, which sends them with the openai client, or with its own HTTP for
the Responses API. A replay returns recorded answers of any provider in this way: calls are recorded as LiteLLM received
them, in OpenAI's format.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_spans.schema.attempts import Attempt

RESPONSES: Final = "/responses"
# prefix of a model's name: LiteLLM's provider for the endpoint
_PREFIXES: Final = {"/completions": "text-completion-openai"}
# Providers whose calls LiteLLM sends unchanged with the openai client, so that they reach the gateway through it.
_BY_OPENAI: Final = frozenset({"openai", "custom_openai", "text-completion-openai", "azure", "azure_text"})
# Arguments for the destination of a call and its credentials; they are not sent to the gateway.
_WHERE: Final = frozenset((
    "model", "api_key", "api_base", "base_url", "api_version", "api_type", "organization", "project", "deployment_id",
    "model_list", "custom_llm_provider", "client", "shared_session", "headers", "extra_headers", "extra_query",
    "ssl_verify", "azure", "hf_model_name", "region_name", "litellm_credential_name", "drop_params",
))  # fmt: skip
_VENDORS: Final = ("aws_", "azure_", "vertex_", "watsonx_", "oci_", "sagemaker_", "bedrock_", "gcs_")
# Arguments that shape an answer. LiteLLM drops them for models that it does not know to support them.
_KEPT: Final = frozenset((
    "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "response_format",
    "tools", "tool_choice", "reasoning_effort",
))  # fmt: skip
# How LiteLLM begins the message of an error of its provider ``openai``.
_TOLD: Final = "OpenAIException - "


class LeftToOwnEndpointError(Exception):
    """A replay leaves a call to the program's own endpoint. The program never sees this."""


def provider_of(given: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the provider that a call names, and its name for the model."""
    model = str(given.get("model"))
    told = given.get("custom_llm_provider")
    provider, _, name = model.partition("/")
    if told:
        return str(told), name if provider == told else model
    return (provider, name) if name else (None, model)


def asks_first(given: Mapping[str, Any], attempt: Attempt | None, endpoint: str) -> bool:
    """Whether a call without a policy asks a replay's gateway before its own endpoint."""
    if attempt is None or attempt.replay is None or attempt.endpoint is None or given.get("fallbacks"):
        return False  # each fallback call asks by itself
    litellm: Any = sys.modules["litellm"]
    try:
        model, provider, _, _ = litellm.get_llm_provider(
            model=str(given.get("model")),
            custom_llm_provider=given.get("custom_llm_provider"),
            api_base=given.get("api_base") or given.get("base_url"),
        )
    except litellm.exceptions.BadRequestError:  # an unknown provider, which the call itself will report
        return False
    if endpoint != RESPONSES:
        return provider not in _BY_OPENAI
    known = litellm.utils.ProviderConfigManager.get_provider_responses_api_config(
        model=model, provider=litellm.types.utils.LlmProviders(provider)
    )
    return known is not None  # otherwise LiteLLM turns it into a chat completion, which asks by itself


def led_to(attempt: Attempt, given: Mapping[str, Any], endpoint: str, model: str) -> dict[str, Any]:
    """Return the arguments for a gateway. Parameters that only another provider knows are left out."""
    kept = {name: given[name] for name in given if name not in _WHERE and not name.startswith(_VENDORS)}
    return {
        **kept,
        "model": f"{_PREFIXES.get(endpoint, 'openai')}/{model}",
        "api_base": f"{attempt.endpoint}/v1",
        "api_key": attempt.key or "unused",
        "drop_params": True,
    }


def shaped_as(given: Mapping[str, Any]) -> list[str]:
    """Name the parameters to send on, even if LiteLLM does not know that a model supports them."""
    own = given.get("allowed_openai_params") or ()
    return [*own, *(name for name in sorted(_KEPT) if given.get(name) is not None)]


def schema_of(kind: type) -> Any:
    """Return the schema of a class that an answer is parsed into, as it appears in a request."""
    return sys.modules["litellm"].utils.type_to_response_format_param(response_format=kind)


def said_again(error: BaseException, provider: str | None) -> None:
    """Give a replayed error its recorded message, if LiteLLM reports it as an error of ``openai``.

    Args:
        error: changed in place.
        provider: the provider that the program names.
    """
    before, _, told = str(error).partition(_TOLD)
    if told.startswith("litellm."):  # recorded as LiteLLM raised it
        said = told
    elif told and provider:  # recorded as the provider sent it
        said = f"{before}{provider[0].upper()}{provider[1:]}Exception - {told}"
    else:
        return
    error.args = (said,)
    error.message = said  # type: ignore[attr-defined] # which LiteLLM's errors have
