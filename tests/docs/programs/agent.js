// Two agents and a tool. Nothing but Node's own fetch: node agent.js
const fs = require("node:fs");
const crypto = require("node:crypto");

// --8<-- [start:ask]
async function ask(agent, system, text) {
  const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
      "content-type": "application/json",
      "x-lightning-agent": agent, // who asks
    },
    body: JSON.stringify({
      model: process.env.LIGHTNING_MODEL ?? "gpt-4.1-mini",
      messages: [{ role: "system", content: system }, { role: "user", content: text }],
      max_tokens: 32,
    }),
  });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return (await answer.json()).choices[0].message.content.trim();
}
// --8<-- [end:ask]

// --8<-- [start:tool]
async function report(agent, tool, startedMs, error) {
  if (!process.env.LIGHTNING_ENDPOINT) return; // no training: nobody wants to know
  const text = (key, value) => ({ key, value: { stringValue: value } });
  const span = {
    traceId: crypto.randomBytes(16).toString("hex"),
    spanId: crypto.randomBytes(8).toString("hex"),
    name: tool,
    startTimeUnixNano: `${startedMs}000000`,
    endTimeUnixNano: `${Date.now()}000000`,
    status: error ? { code: 2, message: error } : { code: 1 },
    attributes: [
      text("gen_ai.operation.name", "execute_tool"),
      text("gen_ai.tool.name", tool),
      text("gen_ai.agent.name", agent),
    ],
  };
  await fetch(`${process.env.LIGHTNING_ENDPOINT}/v1/traces`, {
    method: "POST",
    headers: { authorization: `Bearer ${process.env.LIGHTNING_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ resourceSpans: [{ scopeSpans: [{ spans: [span] }] }] }),
  });
}
// --8<-- [end:tool]

// --8<-- [start:main]
async function main() {
  const task = JSON.parse(fs.readFileSync(0, "utf8")); // the task, on stdin
  const kind = await ask("sorter", "Answer with one word: refund, delivery or account.", task.message);

  const started = Date.now();
  const order = { 17: "sent on Monday" }[task.order];
  await report("writer", "find_order", started, order ? null : `no order ${task.order}`);

  const answer = await ask("writer", `Answer in one sentence. The order: ${order}`, task.message);
  console.log("answer:", answer); // print what you like
  const reward = { sorter: kind === task.kind ? 1 : 0, writer: answer.endsWith(".") ? 1 : 0 };
  console.log(JSON.stringify({ reward })); // the last line: rewards by agent
}
// --8<-- [end:main]

main().catch((error) => {
  console.error(error);
  process.exit(1); // the attempt has failed
});
