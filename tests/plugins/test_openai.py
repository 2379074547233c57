from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lightning_openai import agent, wire
from lightning_spans.testing.plugins import MODEL, PROMPTS, PluginConformance, instructions


def ask(url, name, prompt, *, client=None, **options):
    client = client or openai.OpenAI(base_url=url)
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": prompt}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


async def ask_async(client, name, prompt, **options):
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": prompt}]
    return await client.chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(completion):
    return completion.choices[0].message.content


class TestConformance(PluginConformance):
    framework = "openai"
    unsupported = dict.fromkeys(
        ["tool_call", "parallel_tools", "tool_error", "nested"], "the openai client runs no tools"
    )

    def patched(self):
        return [(owner, name) for owner, name, _ in wire._PATCHES]

    def one_agent(self, url):
        with agent("writer"):
            return text_of(ask(url, "writer", PROMPTS["one_agent"]))

    def two_agents(self, url):
        client = openai.OpenAI(base_url=url)
        output = []
        for name in ("writer", "rewriter"):
            with agent(name):
                output.append(text_of(ask(url, name, PROMPTS["two_agents"], client=client)))
        return output

    def streaming(self, url):
        with agent("writer"):
            chunks = ask(url, "writer", PROMPTS["streaming"], stream=True)
            return [chunk.model_dump() for chunk in chunks]

    def abandoned(self, url):
        with agent("writer"):
            return next(ask(url, "writer", PROMPTS["abandoned"], stream=True)).id

    def parallel(self, url):
        def work(name):
            with agent(name):
                return text_of(ask(url, name, PROMPTS["parallel"]))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, ["left", "right"]))

    async def asynchronous(self, url):
        async with openai.AsyncOpenAI(base_url=url) as client:

            async def work(name):
                with agent(name):
                    return text_of(await ask_async(client, name, PROMPTS["asynchronous"]))

            return await asyncio.gather(work("writer"), work("rewriter"))

    def threads(self, url):
        with agent("writer"), ThreadPoolExecutor(2) as pool:
            return [text_of(a) for a in pool.map(lambda n: ask(url, "writer", f"hello {n}"), range(2))]

    def retried(self, url):
        with agent("writer"):
            return text_of(ask(url, "writer", PROMPTS["retried"]))

    def failed(self, url):
        with agent("writer"), pytest.raises(openai.InternalServerError) as error:
            ask(url, "writer", PROMPTS["failed"], client=openai.OpenAI(base_url=url, max_retries=0))
        return str(error.value)

    def cut(self, url):
        read = []
        with agent("writer"):
            chunks = ask(url, "writer", PROMPTS["cut"], stream=True)
            with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
                read.extend(chunk.model_dump() for chunk in chunks)
        return [read, type(error.value).__name__]

    def callbacks(self, url):
        seen = []
        hooks = {
            "request": [lambda request: seen.append(request.content.decode())],
            "response": [lambda response: seen.append(response.read().decode())],
        }
        client = openai.OpenAI(base_url=url, http_client=openai.DefaultHttpxClient(event_hooks=hooks))
        with agent("writer"):
            return [text_of(ask(url, "writer", PROMPTS["callbacks"], client=client)), seen]
