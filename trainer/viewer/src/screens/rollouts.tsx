// The rollouts of a step: by group, and as a table whose columns sort.
import type { JSX } from "preact";
import type { Facts, GroupRow, RolloutRow } from "../api";
import { SortedTable, type Column } from "../table";
import { Chip, count, duration, href, number, shade, Status } from "../ui";

export interface Entry {
  row: RolloutRow;
  task: string;
  facts: Facts | undefined;
}

const sum = (counts: Record<string, number> | undefined): number | null => (counts ? Object.values(counts).reduce((a, b) => a + b, 0) : null);

function columns(run: string, agents: string[]): Column<Entry>[] {
  const reward = (value: number | null | undefined): JSX.Element => <span class={`cell ${shade(value)}`}>{number(value)}</span>;
  return [
    { name: "task", text: true, value: ({ task }) => task, cell: ({ task, row }) => <a class="clip" href={href("run", run, "rollout", row.rollout_id)}>{task || row.rollout_id}</a> },
    { name: "reward", value: ({ row }) => row.reward, cell: ({ row }) => reward(row.reward) },
    ...(agents.length > 1 ? [{ name: "lowest", label: "lowest agent", title: "the lowest reward of any agent", value: ({ row }: Entry) => row.lowest, cell: ({ row }: Entry) => reward(row.lowest) }] : []),
    ...agents.map((name) => ({ name: `of ${name}`, label: name, title: `reward of ${name}`, value: ({ row }: Entry) => row.by_agent[name] })),
    { name: "status", text: true, value: ({ row }) => row.status, cell: ({ row }) => (row.status === "succeeded" ? "succeeded" : <Status row={row} />) },
    { name: "seconds", value: ({ row }) => row.seconds, cell: ({ row }) => duration(row.seconds === null ? null : row.seconds * 1000) },
    { name: "calls", value: ({ facts }) => facts?.calls },
    { name: "tools", title: "tool calls", value: ({ facts }) => sum(facts?.tools) },
    { name: "errors", title: "failed tool calls and model calls", value: ({ facts }) => facts && facts.tool_errors + facts.call_errors },
    { name: "prompt", label: "prompt tokens", value: ({ facts }) => facts?.prompt_tokens },
    { name: "response", label: "response tokens", value: ({ facts }) => facts?.response_tokens },
  ];
}

export function RolloutTable({ run, entries, agents }: { run: string; entries: Entry[]; agents: string[] }): JSX.Element {
  return <SortedTable label="rollouts" columns={columns(run, agents)} rows={entries} first={agents.length > 1 ? "lowest" : "reward"} />;
}

type Value = (row: RolloutRow) => number | null;

interface Groups {
  run: string;
  groups: GroupRow[];
  facts: Map<string, Facts>;
  value: Value;
  passes: ((row: RolloutRow) => boolean) | null; // null: nothing is filtered
}

export function GroupList({ run, groups, facts, value, passes }: Groups): JSX.Element {
  return (
    <div class="groups">
      {groups.map((group) => (
        <section key={group.group_id} class="group-row">
          <div class="what">
            <a href={href("run", run, "group", group.group_id)}>{group.task || "(empty task)"}</a>
            <small>
              mean <b>{number(group.mean)}</b> ± {number(group.deviation, 2)}
              {!group.signal && <Chip kind="quiet">no signal</Chip>}
            </small>
          </div>
          <div class="cells">
            {group.rollouts.map((row) => (
              <Cell key={row.rollout_id} run={run} row={row} facts={facts.get(row.rollout_id)} value={value(row)} faded={passes !== null && !passes(row)} />
            ))}
          </div>
        </section>
      ))}
    </div>
  );
}

function Cell({ run, row, facts, value, faded }: { run: string; row: RolloutRow; facts: Facts | undefined; value: number | null; faded: boolean }): JSX.Element {
  const title = [
    row.rollout_id,
    `reward ${number(value)}`,
    ...Object.entries(row.by_agent).map(([name, given]) => `${name} ${number(given)}`),
    facts ? `${count(facts.calls, "call")}, ${count(sum(facts.tools) ?? 0, "tool call")}` : "",
    row.error ?? "",
  ];
  const texts: Record<string, string> = { succeeded: number(value, 2), crashed: `${number(value, 2)} ✕`, running: "…", queued: "·" };
  return (
    <a class={`cell ${shade(value)} ${faded ? "faded" : ""} ${row.status === "succeeded" ? "" : "failed"}`} href={href("run", run, "rollout", row.rollout_id)} title={title.filter(Boolean).join("\n")}>
      {texts[row.status] ?? "✕"}
      {(facts?.tool_errors ?? 0) > 0 && <i class="spot" title="a tool failed" />}
    </a>
  );
}
