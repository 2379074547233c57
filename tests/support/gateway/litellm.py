"""Every way to call a model with litellm."""

from __future__ import annotations

import asyncio

import litellm

from lightning_spans.schema import spans as names

USER = [{"role": "user", "content": "hello"}]


def options(server, provider="hosted_vllm"):
    return {"model": f"{provider}/far", "api_base": server.url, "api_key": "secret"}


def chats(sink):
    return [span for span in sink.spans if span.operation == names.CHAT]


def complete(**given):
    return litellm.completion(messages=USER, **given).choices[0].message.content


def complete_async(**given):
    async def ask():
        return await litellm.acompletion(messages=USER, **given)

    return asyncio.run(ask()).choices[0].message.content


def stream(**given):
    return "".join(c.choices[0].delta.content or "" for c in litellm.completion(messages=USER, stream=True, **given))


def stream_async(**given):
    async def ask():
        items = await litellm.acompletion(messages=USER, stream=True, **given)
        return "".join([item.choices[0].delta.content or "" async for item in items])

    return asyncio.run(ask())


def responses(**given):
    return litellm.responses(input="hello", **given).output[0].content[0].text


def responses_async(**given):
    async def ask():
        return await litellm.aresponses(input="hello", **given)

    return asyncio.run(ask()).output[0].content[0].text


def responses_stream(**given):
    events = list(litellm.responses(input="hello", stream=True, **given))
    return events[-1].response.output[0].content[0].text


def router(**given):
    told = litellm.Router([{"model_name": "mine", "litellm_params": given}], num_retries=0)
    return told.completion(model="mine", messages=USER).choices[0].message.content


def router_stream_async(**given):
    async def ask():
        told = litellm.Router([{"model_name": "mine", "litellm_params": given}], num_retries=0)
        items = await told.acompletion(model="mine", messages=USER, stream=True)
        return "".join([item.choices[0].delta.content or "" async for item in items])

    return asyncio.run(ask())


WAYS = [
    complete, complete_async, stream, stream_async, responses, responses_async, responses_stream, router,
    router_stream_async,
]  # fmt: skip
