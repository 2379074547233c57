"""Two agents answer a customer: `sorter` says what a message is about, `writer` answers it."""

import lightning_openai

lightning_openai.attach()  # the first line that training needs

from openai import AsyncOpenAI

client = AsyncOpenAI()
EXAMPLES = {
    "I want my money for the mug.": "refund",
    "Where is my hat?": "delivery",
    "I forgot my password.": "account",
}


async def ask(messages, max_tokens):
    answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=max_tokens)
    return answer.choices[0].message.content.strip()


async def sort(message):
    messages = [{"role": "system", "content": "Sort the message: refund, delivery or account."}]
    for text, kind in EXAMPLES.items():
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": kind}]
    with lightning_openai.agent("sorter"):  # the second: who is at work
        return await ask([*messages, {"role": "user", "content": message}], max_tokens=6)


async def reply(message, kind):
    system = f"Answer the customer in one short sentence. It is about: {kind}"
    with lightning_openai.agent("writer"):
        return await ask([{"role": "system", "content": system}, {"role": "user", "content": message}], max_tokens=20)


async def run(task):
    kind = await sort(task["message"])
    answer = await reply(task["message"], kind)
    sorted_well = 1.0 if kind == task["kind"] else 0.3 if kind in EXAMPLES.values() else 0.0
    return {"sorter": sorted_well, "writer": 1.0 if answer.endswith(".") else 0.0}
