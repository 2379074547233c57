// A run: its curves, its alarms, and its steps to click.
import type { JSX } from "preact";
import { useGet, type HeldOut, type PolicyRow, type RunPage, type StepRow } from "../api";
import { Lines, type Line } from "../charts";
import { Agent, Chip, count, go, href, hue, number, Show, stepHref } from "../ui";
import { Headline } from "./headline";
import { stepName } from "./picker";

type Rows = RunPage["train"];
// Steps count from 1, and a validation is placed at the number of steps before it.
const placeOf = (row: Rows[number]): number => Number(row.step) + (row.kind === "train" ? 1 : 0);
const pick = (rows: Rows, name: string): [number, number][] =>
  rows.filter((row) => typeof row[name] === "number").map((row) => [placeOf(row), Number(row[name])]);
const named = (rows: Rows, start: string): string[] => [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => key.startsWith(start)).sort();
const family = (rows: Rows, start: string): Line[] => named(rows, start).map((key) => ({ name: key.slice(start.length), points: pick(rows, key) }));
const byAgent = (rows: Rows, start: string): Line[] => family(rows, start).map((line) => ({ ...line, tone: hue(line.name) }));
const one = (rows: Rows, name: string, label: string, more: Partial<Line> = {}): Line[] => {
  const points = pick(rows, name);
  return points.length ? [{ name: label, points, ...more }] : [];
};

const ALL: Partial<Line> = { strong: true, tone: "ink" };

export function Overview({ run, tick }: { run: string; tick: number }): JSX.Element {
  const page = useGet<RunPage>("run", { run }, tick);
  return <Show of={page}>{(data) => <Run run={run} page={data} />}</Show>;
}

function Run({ run, page }: { run: string; page: RunPage }): JSX.Element {
  const { train, val, options } = page;
  const open = (place: number): void => go(stepHref(run, "step", "train", Math.max(0, place - 1)));
  const ends = (mode: string): Map<number, [number, number]> =>
    new Map(page.steps.flatMap((row) => (row.mode === mode && row.reward_low !== null && row.reward_high !== null ? [[row.step + (mode === "train" ? 1 : 0), [row.reward_low, row.reward_high]]] : [])));
  const fallback: Line[] = train.length
    ? []
    : [{ name: "mean reward", points: page.steps.filter((r) => r.mode === "train" && r.reward !== null).map((r) => [r.step + 1, r.reward ?? 0]), strong: true, tone: "ink", band: ends("train") }];
  const returns = page.policies.flatMap((each) => each.rollbacks.map((back) => ({ at: back.after, text: `${each.policy} returned to ${back.to_step === 0 ? "its first weights" : `step ${back.to_step}`}` })));
  const agents = options["agents"] as string[] | null | undefined;
  const facts: [string, unknown][] = [
    ["model", options["model"]],
    ["agents", agents?.join(", ") ?? (page.train.length ? "all" : undefined)],
    ["algorithm", options["algorithm"]],
    ["credit", options["credit"]],
    ["program", options["target"] ?? options["command"]],
    ["backend", options["backend"]],
  ];
  return (
    <>
      <h1>{run}</h1>
      <Headline run={run} page={page} />
      <p class="facts">
        {facts.filter(([, value]) => value).map(([name, value]) => (
          <span key={name}>
            {name} <b>{String(value)}</b>
          </span>
        ))}
      </p>
      <Alarms alarms={page.alarms} />
      {Object.entries(page.most_frequent).map(([agent, [text, share]]) => (
        <p key={agent} class="facts">
          <span>
            <Agent name={agent || null} /> {Math.round(share * 100)} % of the answers are <b>{text}</b>
          </span>
        </p>
      ))}
      <div class="charts">
        <Lines
          title="Reward, with its 95 % interval over tasks"
          onStep={open}
          lines={[
            ...one(train, "reward", "training", { strong: true, tone: "ink", band: ends("train") }),
            ...fallback,
            ...one(val, "reward", "held out", { dashed: true, strong: true, tone: "held", band: ends("val") }),
          ]}
          marks={returns}
        />
        <Lines title="Held-out reward by agent, with its 95 % interval" onStep={open} lines={page.headline.held_out.slice(1).map(heldOut)} marks={returns} />
        <Lines title="Held-out reward by policy" onStep={open} lines={page.policies.length > 1 ? page.policies.map(ofPolicy) : []} marks={returns} />
        <Lines title="Held-out reward minus the best before, with its 95 % interval" onStep={open} lines={fromBest(val)} marks={returns} />
        <Lines title="Training reward by agent" onStep={open} lines={byAgent(train, "reward/")} />
        <Lines title="Loss" lines={[...one(train, "loss", "training"), ...one(val, "loss", "held out", { dashed: true, strong: true, tone: "held" })]} />
        <Lines title="Training reward by source" onStep={open} lines={family(train, "reward_source/")} />
        <Lines title="Groups without signal, failed rollouts" onStep={open} lines={[...one(train, "groups_without_signal", "share of groups"), ...failures(train)]} />
        <Lines title="Share of the gradient by agent" onStep={open} lines={byAgent(train, "gradient_share/")} />
        <Lines title="Share of the trained tokens by agent" onStep={open} lines={byAgent(train, "token_share/")} />
        <Lines title="Entropy, nats per token" onStep={open} lines={[...one(train, "entropy", "all", ALL), ...byAgent(train, "entropy/")]} />
        <Lines title="KL" onStep={open} lines={[...one(train, "kl", "kl"), ...one(train, "approx_kl", "of the update")]} />
        <Lines title="Gap between engine and trainer, nats" onStep={open} lines={one(train, "logprob_gap", "mean gap")} />
        <Lines title="Clipped share, gradient norm" onStep={open} lines={[...one(train, "clip_fraction", "clipped"), ...one(train, "grad_norm", "gradient norm")]} />
        <Lines title="Staleness, updates" onStep={open} lines={[...one(train, "staleness", "mean"), ...one(train, "staleness_max", "most")]} />
        <Lines title="Tokens per answer" onStep={open} lines={[...one(train, "response_tokens", "all", ALL), ...byAgent(train, "response_tokens/")]} />
        <Lines title="Tool errors, share" onStep={open} lines={[...one(train, "tool_error_rate", "all", ALL), ...family(train, "tool_error_rate/")]} />
        <Lines
          title="Seconds by phase"
          onStep={open}
          lines={[...one(train, "rollout_seconds", "rollouts"), ...one(train, "update_seconds", "update"), ...one(train, "adapt_seconds", "rows"), ...one(train, "seconds", "step", { strong: true, tone: "ink" })]}
        />
      </div>
      <h2>Steps</h2>
      {page.steps.length === 0 && <p class="note">No rollout is in this store{page.loose ? ", but traces outside of rollouts are" : ""}.</p>}
      {page.loose && (
        <p>
          <a href={href("run", run, "loose")}>Traces outside of rollouts</a>, as attached programs record them
        </p>
      )}
      {page.steps.length > 0 && <Steps run={run} steps={page.steps} />}
      {Object.keys(options).length > 0 && (
        <details class="card">
          <summary>Options of the run</summary>
          <pre>{JSON.stringify(options, null, 2)}</pre>
        </details>
      )}
    </>
  );
}

const heldOut = (of: HeldOut): Line => ({
  name: of.agent,
  points: of.points.map((point) => [point.step, point.mean]),
  dashed: !of.trained,
  tone: hue(of.agent),
  band: new Map(of.points.flatMap((point) => (point.low !== null && point.high !== null ? [[point.step, [point.low, point.high]] as const] : []))) as Map<number, [number, number]>,
});

const ofPolicy = (of: PolicyRow): Line => ({ name: of.policy, points: of.points.map(([step, mean]) => [step, mean]), tone: hue(of.policy) });

/** How far each agent's held-out reward is from its best before; below 0 it has fallen. */
function fromBest(rows: Rows): Line[] {
  const names = named(rows, "from_best").filter((key) => !/^from_best_(low|high)/.test(key));
  return names.map((key) => {
    const suffix = key.slice("from_best".length);
    const low = new Map(pick(rows, `from_best_low${suffix}`));
    const high = new Map(pick(rows, `from_best_high${suffix}`));
    const band = new Map([...low].flatMap(([step, value]) => (high.has(step) ? [[step, [value, high.get(step) ?? value]] as [number, [number, number]]] : [])));
    return { name: suffix.slice(1) || "trained agents", points: pick(rows, key), band, ...(suffix ? { tone: hue(suffix.slice(1)) } : ALL) };
  });
}

function Alarms({ alarms }: { alarms: RunPage["alarms"] }): JSX.Element {
  return (
    <div id="alarms">
      {alarms.map((alarm, at) => (
        <p key={at} class="note bad" role="alert">
          <b>after {count(Number(alarm["steps_taken"]), "step")}</b> {String(alarm["text"])}
        </p>
      ))}
    </div>
  );
}

const failures = (rows: Rows): Line[] => {
  const points = rows.filter((row) => Number(row["rollouts"]) > 0).map((row) => [placeOf(row), Number(row["failed"]) / Number(row["rollouts"])] as [number, number]);
  return points.length ? [{ name: "share of rollouts failed", points, tone: "bad-line" }] : [];
};

function Steps({ run, steps }: { run: string; steps: StepRow[] }): JSX.Element {
  return (
    <div class="scroll">
      <table class="rows">
        <thead>
          <tr>
            <th>step</th>
            <th class="num" title="over tasks, failures included; while a step runs, of the rollouts that have succeeded so far">
              mean, 95 %
            </th>
            <th class="num">lowest</th>
            <th class="num">highest</th>
            <th class="num">groups</th>
            <th class="num" title="groups whose rewards are all equal: nothing is learned from them">no signal</th>
            <th class="num">rollouts</th>
            <th>failed or open</th>
          </tr>
        </thead>
        <tbody>
          {steps.map((row) => (
            <tr key={`${row.mode}${row.step}`} class={row.mode}>
              <td>
                <a href={stepHref(run, "step", row.mode, row.step)}>{stepName(row.mode, row.step)}</a>
              </td>
              <td class="num">
                {number(row.reward)}
                {row.reward_low !== null && (
                  <small class="dim">
                    {" "}
                    {number(row.reward_low, 2)} to {number(row.reward_high, 2)}
                  </small>
                )}
              </td>
              <td class="num">{number(row.low)}</td>
              <td class="num">{number(row.high)}</td>
              <td class="num">{number(row.groups)}</td>
              <td class="num">{number(row.flat)}</td>
              <td class="num">{number(row.rollouts)}</td>
              <td>
                {Object.entries(row.status)
                  .filter(([status]) => status !== "succeeded")
                  .map(([status, n]) => (
                    <Chip key={status} kind={status === "queued" || status === "running" ? "busy" : "bad"}>
                      {n} {status}
                    </Chip>
                  ))}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
