"""A support service whose threads were begun long before any task, and take each message from a queue."""

# --8<-- [start:main]
import contextvars
import queue
import threading
from concurrent.futures import Future

import lightning_openai

attachment = lightning_openai.attach()

from openai import OpenAI

client = OpenAI()
desk = queue.Queue()


def reply(message):
    with lightning_openai.agent("writer"):
        messages = [{"role": "user", "content": message}]
        answer = client.chat.completions.create(model="gpt-4.1-mini", messages=messages, max_tokens=32)
    return answer.choices[0].message.content


def serve():
    while True:
        context, message, answer = desk.get()
        try:
            answer.set_result(context.run(reply, message))  # in the attempt of whoever asked
        except Exception as error:
            answer.set_exception(error)


for _ in range(4):
    threading.Thread(target=serve, daemon=True).start()


def run(task):
    answer = Future()
    desk.put((contextvars.copy_context(), task["message"], answer))
    return float(answer.result().endswith("."))


# --8<-- [end:main]
