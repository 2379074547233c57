// Tools and model calls: errors, latency, tokens. Fleet: runners, queue, attempts that take long.
import type { JSX } from "preact";
import { useGet, type CallLink, type FleetPage, type Percentiles, type RunPage, type ToolRow, type ToolsPage, type UsageRow } from "../api";
import { SortedTable, type Column } from "../table";
import { Agent, Chip, duration, go, href, number, Show, stepHref, useKeys } from "../ui";
import { isUnderWay, lastStep, StepPicker, stepName } from "./picker";

export function Tools({ run, mode, step, tick }: { run: string; mode: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const row = step === null ? lastStep(data.steps, mode) : data.steps.find((each) => each.mode === mode && each.step === step);
        return row === undefined ? <p class="note">This store has no such rollout.</p> : <One key={`${row.mode}${row.step}`} run={run} mode={row.mode} step={row.step} known={data.steps} tick={isUnderWay(row) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, mode, step, known, tick }: { run: string; mode: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const page = useGet<ToolsPage>("tools", { run, mode, step }, tick);
  useKeys({ u: () => go(stepHref(run, "step", mode, step)) });
  return (
    <>
      <div class="head">
        <h1>Model calls and tools of {stepName(mode, step)}</h1>
        <StepPicker run={run} screen="tools" mode={mode} step={step} known={known} />
      </div>
      <Show of={page}>
        {(data) => (
          <>
            <h2>Model calls: latency and tokens</h2>
            {data.usage.length === 0 ? <p class="note">No model call was recorded in {number(data.rollouts)} attempts.</p> : <SortedTable label="latency and tokens of model calls" columns={usageColumns(run)} rows={data.usage} first="agent" param="calls" />}
            <h2>Tools</h2>
            {data.tools.length === 0 ? (
              <p class="note">No tool was used in {number(data.rollouts)} attempts.</p>
            ) : (
              <SortedTable label="tools" columns={toolColumns(run)} rows={data.tools} first="-errors" />
            )}
          </>
        )}
      </Show>
    </>
  );
}

const spanAddress = (run: string, link: CallLink): string => href("run", run, "rollout", link.rollout_id, link.attempt_id, link.span_id);

const PERCENTS = ["p50", "p90", "p99"] as const;

const percentColumns = (name: string, label: string, of: (row: UsageRow) => Percentiles, show: (value: number) => string): Column<UsageRow>[] =>
  PERCENTS.map((each, at) => ({ name: `${name}-${each}`, label: each, group: label, first: at === 0, value: (row) => of(row)[each], cell: (row) => show(of(row)[each]) }));

const whole = (value: number): string => number(Math.round(value));

const slowestColumn = <T extends { ms: Percentiles; slowest: CallLink | null }>(run: string): Column<T> => ({
  name: "slowest",
  value: (row) => row.ms.most,
  cell: (row) => (row.slowest ? <a href={spanAddress(run, row.slowest)}>{duration(row.ms.most)}</a> : duration(row.ms.most)),
});

const usageColumns = (run: string): Column<UsageRow>[] => [
  { name: "agent", text: true, value: (row) => (row.slowest === null ? "" : row.agent), cell: (row) => (row.slowest === null ? <b>whole rollouts</b> : <Agent name={row.agent} />) },
  { name: "number", value: (row) => row.number },
  { name: "failed", value: (row) => row.errors, cell: (row) => <span class={row.errors ? "bad" : ""}>{number(row.errors)}</span> },
  ...percentColumns("ms", "latency", (row) => row.ms, duration),
  { ...slowestColumn<UsageRow>(run), group: "latency" },
  ...percentColumns("prompt", "prompt tokens", (row) => row.prompt_tokens, whole),
  ...percentColumns("response", "response tokens", (row) => row.response_tokens, whole),
];

const toolColumns = (run: string): Column<ToolRow>[] => [
  { name: "tool", text: true, value: (row) => row.tool, cell: (row) => <b>{row.tool}</b> },
  { name: "agent", text: true, value: (row) => row.agent, cell: (row) => <Agent name={row.agent} /> },
  { name: "calls", value: (row) => row.calls },
  { name: "errors", value: (row) => row.errors, cell: (row) => <span class={row.errors ? "bad" : ""}>{number(row.errors)}</span> },
  {
    name: "share",
    label: "share of errors",
    value: (row) => row.errors / row.calls,
    cell: (row) => (
      <>
        <span class="meter">
          <i style={{ width: `${(row.errors / row.calls) * 100}%` }} />
        </span>{" "}
        {((row.errors / row.calls) * 100).toFixed(0)} %
      </>
    ),
  },
  { name: "repeated", title: "calls with the same arguments as an earlier call of the attempt", value: (row) => row.repeated },
  ...PERCENTS.map((name) => ({ name, value: (row: ToolRow) => row.ms[name], cell: (row: ToolRow) => duration(row.ms[name]) })),
  slowestColumn<ToolRow>(run),
  { name: "error", label: "an error", text: true, value: (row) => row.error, cell: (row) => (row.failed ? <a class="clip" href={spanAddress(run, row.failed)}>{row.error || "error"}</a> : "") },
];

export function Fleet({ run, tick }: { run: string; tick: number }): JSX.Element {
  const page = useGet<FleetPage>("fleet", { run }, tick);
  return (
    <>
      <h1>Fleet</h1>
      <Show of={page}>
        {(data) => (
          <>
            <p class="facts">
              <span>
                <b>{number(data.queued)}</b> rollouts wait
              </span>
              <span>
                <b>{number(data.running)}</b> attempts run
              </span>
            </p>
            {data.oldest.length > 0 && (
              <>
                <h2>Under way, the longest first</h2>
                <div class="scroll">
                  <table class="rows">
                    <tbody>
                      {data.oldest.map((row) => (
                        <tr key={row.attempt_id}>
                          <td>
                            <a href={href("run", run, "rollout", row.rollout_id, row.attempt_id)}>{row.rollout_id}</a>
                          </td>
                          <td>{row.worker}</td>
                          <td class="num">{duration(row.seconds * 1000)}</td>
                          <td>{row.limit_s !== null && row.seconds > row.limit_s ? <Chip kind="bad">beyond its limit of {duration(row.limit_s * 1000)}</Chip> : row.limit_s !== null ? `of ${duration(row.limit_s * 1000)}` : "no limit"}</td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </div>
              </>
            )}
            <h2>Runners</h2>
            <div class="scroll" role="group" aria-label="runners" tabIndex={0}>
              <table class="rows">
                <thead>
                  <tr>
                    <th>worker</th>
                    <th class="num">attempts</th>
                    <th class="num">running</th>
                    <th>ended</th>
                    <th>last seen</th>
                  </tr>
                </thead>
                <tbody>
                  {data.workers.map((row) => (
                    <tr key={row.worker}>
                      <td>{row.worker}</td>
                      <td class="num">{number(row.attempts)}</td>
                      <td class="num">{number(row.running)}</td>
                      <td>
                        {Object.entries(row.status)
                          .filter(([status]) => status !== "running")
                          .map(([status, n]) => (
                            <Chip key={status} kind={status === "succeeded" ? "" : "bad"}>
                              {n} {status}
                            </Chip>
                          ))}
                      </td>
                      <td>{row.last_s === null ? "–" : new Date(row.last_s * 1000).toLocaleString()}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </>
        )}
      </Show>
    </>
  );
}
