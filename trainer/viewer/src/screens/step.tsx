// A step: the histogram of its rewards, its groups, what is filtered by a click, an agent, a tool or a text.
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { useGet, type RolloutRow, type RunPage, type StepRow } from "../api";
import { binsOf, Histogram, inBin, type Bin } from "../charts";
import { useFacts, useGroups } from "../facts";
import { useFlag, useParam } from "../params";
import { count, go, href, number, ScaleKey, Show, Signed, stepHref, Toggle, useKeys } from "../ui";
import { capital, StepPicker, stepName } from "./picker";
import { GroupList, RolloutTable } from "./rollouts";

interface Props {
  run: string;
  mode: string;
  step: number | null;
  tick: number;
}

export function Step({ run, mode, step, tick }: Props): JSX.Element {
  const page = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={page}>
      {(data) => {
        const steps = data.steps.filter((row) => row.mode === mode);
        const chosen = step ?? steps.at(-1)?.step;
        if (chosen === undefined) {
          const other = data.steps[0];
          if (other && step === null) queueMicrotask(() => location.replace(stepHref(run, "step", other.mode, other.step)));
          return <p class="note">No rollout is in this store.</p>;
        }
        return <OneStep key={`${mode}${chosen}`} run={run} mode={mode} step={chosen} known={data.steps} tick={tick} />;
      }}
    </Show>
  );
}

/** How the mean of the rollouts that succeeded has changed since the step of this kind before. */
function Since({ now, known }: { now: StepRow | undefined; known: StepRow[] }): JSX.Element | null {
  const before = known.filter((row) => now !== undefined && row.mode === now.mode && row.step < now.step).at(-1);
  if (now === undefined || before === undefined || now.reward === null || before.reward === null) return null;
  return (
    <span title="means over the rollouts that succeeded">
      <Signed value={now.reward - before.reward} /> since {stepName(before.mode, before.step)}
    </span>
  );
}

const nameOf = (bin: Bin | undefined): string => (bin ? `${bin.low}..${bin.high}` : "");

/** The range of rewards that an address names; null where it names none. */
function rangeIn(text: string): Bin | null {
  const [low, high] = text.split("..").map(Number);
  return text && low !== undefined && high !== undefined && Number.isFinite(low) && Number.isFinite(high) ? { low, high, values: 0 } : null;
}

function OneStep({ run, mode, step, known, tick }: { run: string; mode: string; step: number; known: StepRow[]; tick: number }): JSX.Element {
  const { groups, total, error } = useGroups(run, mode, step, tick);
  const rollouts = useMemo(() => groups.flatMap((group) => group.rollouts), [groups]);
  const [sought, setSought] = useParam("text");
  const [text, setText] = useState(sought);
  const { facts, done } = useFacts(run, rollouts, sought, tick);
  const [bin, setBin] = useParam("reward");
  const [agent, setAgent] = useParam("agent");
  const [tool, setTool] = useParam("tool");
  const [kind, setKind] = useParam("failure");
  const [signal, setSignal] = useFlag("nosignal");
  const [measure, setMeasure] = useParam("of");
  const [view, setView] = useParam("view", "groups");
  useEffect(() => {
    const timer = setTimeout(() => text.trim() !== sought && setSought(text.trim()), 300);
    return () => clearTimeout(timer);
  }, [text]);
  useKeys({ u: () => go(href("run", run)) });
  const value = (row: RolloutRow): number | null => (measure ? (row.by_agent[measure] ?? null) : row.reward);
  const values = rollouts.map(value).filter((each): each is number => each !== null);
  const bins = useMemo(() => binsOf(values), [groups, measure]);
  const range = rangeIn(bin);
  const chosen = range === null ? -1 : bins.findIndex((each) => each.low === range.low && each.high === range.high);
  const agents = [...new Set([...facts.values()].flatMap((each) => Object.keys(each.agents)))].sort();
  const tools = [...new Set([...facts.values()].flatMap((each) => Object.keys(each.tools)))].sort();
  const rewarded = [...new Set(rollouts.flatMap((row) => Object.keys(row.by_agent)))].sort();
  const kinds = new Map<string, number>();
  for (const row of rollouts) if (row.status !== "succeeded") kinds.set(failure(row), (kinds.get(failure(row)) ?? 0) + 1);
  const passes = (row: RolloutRow): boolean => {
    const its = facts.get(row.rollout_id);
    const own = value(row);
    return (
      (range === null || (own !== null && inBin(own, range, range.high === bins.at(-1)?.high))) &&
      (!agent || (its?.agents[agent] ?? 0) > 0) &&
      (!tool || (its?.tools[tool] ?? 0) > 0) &&
      (!kind || (row.status !== "succeeded" && failure(row) === kind)) &&
      (!sought || its?.found === true)
    );
  };
  const filtered = range !== null || agent !== "" || tool !== "" || kind !== "" || sought !== "";
  const shown = groups.filter((group) => (!signal || !group.signal) && (!filtered || group.rollouts.some(passes)));
  const flat = groups.filter((group) => !group.signal).length;
  const mean = values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
  const matching = rollouts.filter(passes).length;
  return (
    <>
      <div class="head">
        <h1>{capital(stepName(mode, step))}</h1>
        <StepPicker run={run} screen="step" mode={mode} step={step} known={known} />
        {mode === "train" && (
          <span class="also">
            <a href={stepHref(run, "account", mode, step)}>account</a>
            <a href={stepHref(run, "credit", mode, step)}>credit</a>
            <a href={stepHref(run, "rewards", mode, step)}>rewards</a>
            <a href={stepHref(run, "tools", mode, step)}>tools</a>
          </span>
        )}
      </div>
      {error && <p class="note bad">{error.message}</p>}
      <section class="card">
        <p class="facts">
          <span>
            mean <b>{number(mean)}</b>
          </span>
          <Since now={known.find((row) => row.mode === mode && row.step === step)} known={known} />
          <span data-testid="rollouts">
            <b>{rollouts.length}</b> rollouts
          </span>
          <span>
            <b>{total ?? 0}</b> groups
          </span>
          <span>
            <Toggle on={signal} onClick={() => setSignal(!signal)} title="Show only these: all their rewards are equal, so nothing is learned from them">
              {flat} without signal
            </Toggle>
          </span>
          {[...kinds].map(([name, n]) => (
            <span key={name}>
              <Toggle on={kind === name} onClick={() => setKind(kind === name ? "" : name)}>
                <span class="bad">
                  {n} {name}
                </span>
              </Toggle>
            </span>
          ))}
          <span data-testid="calls">
            <b>{done ? number([...facts.values()].reduce((sum, each) => sum + each.calls, 0)) : "…"}</b> model calls
          </span>
          <span class="grow" />
          <ScaleKey />
        </p>
        {bins.length > 0 && <Histogram bins={bins} chosen={chosen < 0 ? null : chosen} onChoose={(at) => setBin(at === null ? "" : nameOf(bins[at]))} label="Rewards: press a bin to see its rollouts" />}
        <div class="bar">
          {rewarded.length > 0 && (
            <label>
              reward of{" "}
              <select value={measure} onChange={(e) => (setMeasure(e.currentTarget.value), setBin(""))}>
                <option value="">the attempt</option>
                {rewarded.map((name) => (
                  <option key={name}>{name}</option>
                ))}
              </select>
            </label>
          )}
          <label>
            agent{" "}
            <select value={agent} onChange={(e) => setAgent(e.currentTarget.value)}>
              <option value="">any</option>
              {agents.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
          <label>
            tool{" "}
            <select value={tool} onChange={(e) => setTool(e.currentTarget.value)}>
              <option value="">any</option>
              {tools.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
          <label class="grow">
            text <input type="search" value={text} placeholder="in prompts, answers, arguments, results, errors" onInput={(e) => setText(e.currentTarget.value)} />
          </label>
          <span class="toggles" role="group" aria-label="view">
            <Toggle on={view === "groups"} onClick={() => setView("groups")}>
              groups
            </Toggle>
            <Toggle on={view === "table"} onClick={() => setView("table")}>
              table
            </Toggle>
          </span>
        </div>
        {filtered && (
          <p class="dim" aria-live="polite">
            {count(matching, "rollout")} {done ? "" : "so far"}
          </p>
        )}
      </section>
      {view === "table" ? (
        <RolloutTable
          run={run}
          agents={rewarded}
          entries={shown.flatMap((group) => group.rollouts.filter(passes).map((row) => ({ row, task: group.task, facts: facts.get(row.rollout_id) })))}
        />
      ) : (
        <GroupList run={run} groups={shown} facts={facts} value={value} passes={filtered ? passes : null} />
      )}
      {total !== null && groups.length < total && <p class="note">{groups.length} of {total} groups …</p>}
      {groups.length > 0 && shown.length === 0 && <p class="note">Nothing matches{done ? "" : " so far"}.</p>}
    </>
  );
}

const failure = (row: RolloutRow): string => (row.kind && row.kind !== row.status ? `${row.status}: ${row.kind}` : row.status);
