"""A support service with a loop of its own. When it has room it takes rollouts, as it takes its customers' messages."""

# --8<-- [start:main]
import asyncio

import lightning_openai
from lightning_spans import Reward, use_attempt

attachment = lightning_openai.attach()

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def reply(message):  # as it answers customers
    with lightning_openai.agent("writer"):
        messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": message}]
        answer = await client.chat.completions.create(model="gpt-4.1-mini", messages=messages, max_tokens=32)
    return answer.choices[0].message.content


async def rollout(store, attempt):
    ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
    try:
        with use_attempt(attempt.context):  # what is asked inside belongs to this attempt
            said = await reply(attempt.rollout.task["message"])
        reward = Reward(**ids, value=float(said.endswith(".")), agent="writer")
        end = {"status": "succeeded", "rewards": [reward]}
    except Exception as error:
        end = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    await asyncio.to_thread(attachment.flush)  # its key is good until its end
    await asyncio.to_thread(store.finish, attempt.attempt_id, attempt.fence, **end)


async def take(store, room):
    """Work on up to `room` rollouts at once. Return how many there were."""
    attempts = await asyncio.to_thread(store.claim, "support-service", limit=room, lease_s=120.0)
    await asyncio.gather(*(rollout(store, attempt) for attempt in attempts))
    return len(attempts)


# --8<-- [end:main]
