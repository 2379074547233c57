// The official openai and anthropic clients of npm, asked by test_npm.py. Prints one line of JSON.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, apiKey] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const parameters = { type: "object", properties: { expression: { type: "string" } } };
const tools = [{ type: "function", function: { name: "calculator", parameters } }];
const found = {};

const messages = [{ role: "user", content: "What is 12+7?" }];
const first = await openai.chat.completions.create({ model: "policy", messages, tools });
messages.push(first.choices[0].message);
for (const call of first.choices[0].message.tool_calls) {
  messages.push({ role: "tool", tool_call_id: call.id, content: "19" });
}
const second = await openai.chat.completions.create({ model: "policy", messages, tools });
found.chat = second.choices[0].message.content;

found.stream = "";
const stream = await openai.chat.completions.create({ model: "policy", messages, tools, stream: true });
for await (const chunk of stream) found.stream += chunk.choices[0]?.delta?.content ?? "";

found.response = (await openai.responses.create({ model: "policy", input: "hi" })).output_text;
found.events = "";
for await (const event of await openai.responses.create({ model: "policy", input: "hi", stream: true })) {
  if (event.type === "response.output_text.delta") found.events += event.delta;
}

const asked = { model: "policy", max_tokens: 50, messages: [{ role: "user", content: "hi" }] };
found.message = (await anthropic.messages.create(asked)).content[0].text;
found.blocks = await anthropic.messages.stream(asked).finalText();

try {
  await openai.chat.completions.create({ model: "policy", messages, temprature: 1 });
} catch (error) {
  found.refused = error instanceof OpenAI.BadRequestError && error.message.includes("temprature");
}
console.log(JSON.stringify(found));
