// A step: the histogram of its rewards, its groups, what is filtered by a click, an agent, a tool or a text.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, useGet, type Facts, type GroupRow, type RolloutRow, type RunPage, type StepPage } from "../api";
import { binsOf, Histogram, inBin } from "../charts";
import { Chip, count, extent, go, href, isOpen, number, shade, Show, Signed, Toggle, useKeys } from "../ui";

type StepRow = RunPage["steps"][number];

interface Props {
  run: string;
  mode: string;
  step: number | null;
  bin: string;
  tick: number;
}

export function Step({ run, mode, step, bin, tick }: Props): JSX.Element {
  const page = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={page}>
      {(data) => {
        const steps = data.steps.filter((row) => row.mode === mode);
        const chosen = step ?? steps.at(-1)?.step;
        if (chosen === undefined) {
          const other = data.steps[0];
          if (other && step === null) queueMicrotask(() => location.replace(href("run", run, "step", other.mode, other.step)));
          return <p class="note">No rollout is in this store.</p>;
        }
        return <OneStep key={`${mode}${chosen}`} run={run} mode={mode} step={chosen} known={data.steps} bin={bin} tick={tick} />;
      }}
    </Show>
  );
}

/** What a screen without a step in its address shows: the last of training, else of whatever was run. */
export const lastStep = (known: RunPage["steps"], mode: string): StepRow | undefined => known.filter((row) => row.mode === (mode || "train")).at(-1) ?? (mode ? undefined : known.at(-1));

/** Whether anything of a step goes on, so that what is said of it is not the last word. */
export const goesOn = (row: StepRow | undefined): boolean => Object.keys(row?.status ?? {}).some(isOpen);

export const nameOf = (mode: string, step: number): string => (mode === "train" ? `step ${step}` : mode === "val" ? `the tasks held out after ${step}` : "all rollouts");

export function StepPicker({ run, screen, mode, step, known }: { run: string; screen: string; mode: string; step: number; known: RunPage["steps"] }): JSX.Element {
  const at = known.findIndex((row) => row.mode === mode && row.step === step);
  const near = (by: number): void => {
    for (let next = at + by; known[next]; next += by) {
      const row = known[next];
      if (row?.mode === mode) {
        go(href("run", run, screen, ...(screen === "account" || screen === "credit" ? [row.step] : [row.mode, row.step])));
        return;
      }
    }
  };
  useKeys({ n: () => near(1), p: () => near(-1) });
  return (
    <span class="picker">
      <button type="button" aria-label="previous step" onClick={() => near(-1)}>
        ‹
      </button>
      <select
        aria-label="step"
        value={`${mode}/${step}`}
        onChange={(e) => {
          const [kind = "", number = ""] = e.currentTarget.value.split("/");
          go(href("run", run, screen, ...(screen === "account" || screen === "credit" ? [number] : [kind, number])));
        }}
      >
        {known
          .filter((row) => row.mode === "train" || (screen !== "account" && screen !== "credit"))
          .map((row) => (
            <option key={`${row.mode}/${row.step}`} value={`${row.mode}/${row.step}`}>
              {row.mode === "train" ? `step ${row.step}` : row.mode === "val" ? `held out after ${row.step}` : "other rollouts"}
            </option>
          ))}
      </select>
      <button type="button" aria-label="next step" onClick={() => near(1)}>
        ›
      </button>
    </span>
  );
}

/** How the mean of the rollouts that succeeded has changed since the step of this kind before. */
function Since({ now, known }: { now: StepRow | undefined; known: StepRow[] }): JSX.Element | null {
  const before = known.filter((row) => now !== undefined && row.mode === now.mode && row.step < now.step).at(-1);
  if (now === undefined || before === undefined || now.reward === null || before.reward === null) return null;
  return (
    <span title="means over the rollouts that succeeded">
      <Signed value={now.reward - before.reward} /> since {before.mode === "train" ? `step ${before.step}` : `held out after ${before.step}`}
    </span>
  );
}

/** All groups of a step, page by page, so that the first ones show at once. */
function useGroups(run: string, mode: string, step: number, tick: number): { groups: GroupRow[]; total: number | null; error: Error | null } {
  const [groups, setGroups] = useState<GroupRow[]>([]);
  const [total, setTotal] = useState<number | null>(null);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      const found: GroupRow[] = [];
      let after: number | null = 0;
      while (after !== null && !stop.signal.aborted) {
        const page: StepPage = await get<StepPage>("step", { run, mode, step, after, limit: 50 }, stop.signal);
        found.push(...page.groups);
        after = page.next ?? null;
        if (tick === 0 || after === null) setGroups([...found]);
        setTotal(page.total);
      }
    };
    read().catch((problem: Error) => !stop.signal.aborted && setError(problem));
    return () => stop.abort();
  }, [run, mode, step, tick]);
  return { groups, total, error };
}

/** What is counted in traces comes in after the rewards, some rollouts at a time, and again of those that went on. */
function useFacts(run: string, rollouts: RolloutRow[], text: string, tick: number): { facts: Map<string, Facts>; done: boolean } {
  const [facts, setFacts] = useState<Map<string, Facts>>(new Map());
  const [done, setDone] = useState(false);
  const known = useRef({ text: "", stood: new Map<string, string>(), facts: new Map<string, Facts>() });
  const stands = (row: RolloutRow): string => `${row.status}/${row.attempts}`;
  const key = rollouts.map((row) => `${row.rollout_id}/${stands(row)}`).join("|");
  useEffect(() => {
    const stop = new AbortController();
    if (known.current.text !== text) known.current = { text, stood: new Map(), facts: new Map() };
    const { stood, facts: found } = known.current;
    const wanted = rollouts.filter((row) => row.status === "running" || stood.get(row.rollout_id) !== stands(row));
    const read = async (): Promise<void> => {
      for (let at = 0; at < wanted.length && !stop.signal.aborted; at += 24) {
        const some = wanted.slice(at, at + 24);
        const fresh = new Map<string, Facts>();
        for (const each of await get<Facts[]>("facts", { run, rollout: some.map((row) => row.rollout_id), text }, stop.signal)) {
          const before = fresh.get(each.rollout_id);
          fresh.set(each.rollout_id, before ? { ...each, found: each.found || before.found } : each);
        }
        for (const row of some) stood.set(row.rollout_id, stands(row));
        for (const [id, each] of fresh) found.set(id, each);
        setFacts(new Map(found));
      }
      setDone(true);
    };
    if (rollouts.some((row) => !found.has(row.rollout_id))) setDone(false);
    if (rollouts.length) read().catch(() => !stop.signal.aborted && setDone(true));
    return () => stop.abort();
  }, [run, key, text, tick]);
  return { facts, done };
}

function OneStep({ run, mode, step, known, tick }: { run: string; mode: string; step: number; known: RunPage["steps"]; bin: string; tick: number }): JSX.Element {
  const { groups, total, error } = useGroups(run, mode, step, tick);
  const rollouts = useMemo(() => groups.flatMap((group) => group.rollouts), [groups]);
  const [text, setText] = useState("");
  const [sought, setSought] = useState("");
  const { facts, done } = useFacts(run, rollouts, sought, tick);
  const [bin, setBin] = useState<number | null>(null);
  const [agent, setAgent] = useState("");
  const [tool, setTool] = useState("");
  const [kind, setKind] = useState("");
  const [signal, setSignal] = useState(false);
  const [measure, setMeasure] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setSought(text.trim()), 300);
    return () => clearTimeout(timer);
  }, [text]);
  useKeys({ u: () => go(href("run", run)) });
  const value = (row: RolloutRow): number | null => (measure ? (row.by_agent[measure] ?? null) : row.reward);
  const values = rollouts.map(value).filter((each): each is number => each !== null);
  const bins = useMemo(() => binsOf(values), [groups, measure]);
  const [low, high] = extent(values);
  const agents = [...new Set([...facts.values()].flatMap((each) => Object.keys(each.agents)))].sort();
  const tools = [...new Set([...facts.values()].flatMap((each) => Object.keys(each.tools)))].sort();
  const rewarded = [...new Set(rollouts.flatMap((row) => Object.keys(row.by_agent)))].sort();
  const kinds = new Map<string, number>();
  for (const row of rollouts) if (row.status !== "succeeded") kinds.set(failure(row), (kinds.get(failure(row)) ?? 0) + 1);
  const passes = (row: RolloutRow): boolean => {
    const its = facts.get(row.rollout_id);
    const chosen = bin === null ? undefined : bins[bin];
    const own = value(row);
    return (
      (!chosen || (own !== null && inBin(own, chosen, bin === bins.length - 1))) &&
      (!agent || (its?.agents[agent] ?? 0) > 0) &&
      (!tool || (its?.tools[tool] ?? 0) > 0) &&
      (!kind || (row.status !== "succeeded" && failure(row) === kind)) &&
      (!sought || its?.found === true)
    );
  };
  const filtered = bin !== null || agent !== "" || tool !== "" || kind !== "" || sought !== "";
  const shown = groups.filter((group) => (!signal || !group.signal) && (!filtered || group.rollouts.some(passes)));
  const flat = groups.filter((group) => !group.signal).length;
  const mean = values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
  const matching = rollouts.filter(passes).length;
  return (
    <>
      <div class="head">
        <h1>{mode === "train" ? `Step ${step}` : mode === "val" ? `Held out after ${step} steps` : "Rollouts"}</h1>
        <StepPicker run={run} screen="step" mode={mode} step={step} known={known} />
        {mode === "train" && (
          <span class="also">
            <a href={href("run", run, "account", step)}>account</a>
            <a href={href("run", run, "credit", step)}>credit</a>
            <a href={href("run", run, "rewards", mode, step)}>rewards</a>
            <a href={href("run", run, "tools", mode, step)}>tools</a>
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
        </p>
        {bins.length > 0 && <Histogram bins={bins} chosen={bin} onChoose={setBin} label="Rewards: press a bin to see its rollouts" />}
        <div class="bar">
          {rewarded.length > 0 && (
            <label>
              reward of{" "}
              <select value={measure} onChange={(e) => (setMeasure(e.currentTarget.value), setBin(null))}>
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
          {filtered && (
            <span aria-live="polite">
              {count(matching, "rollout")} {done ? "" : "so far"}
            </span>
          )}
        </div>
      </section>
      <div class="groups">
        {shown.map((group) => (
          <section key={group.group_id} class="group-row">
            <div class="what">
              <a href={href("run", run, "group", group.group_id)}>{group.task || "(empty task)"}</a>
              <small>
                mean <b>{number(group.mean)}</b> ± {number(group.deviation, 2)}
                {!group.signal && <Chip kind="quiet">no signal</Chip>}
              </small>
            </div>
            <div class="cells">
              {group.rollouts.map((row) => {
                const its = facts.get(row.rollout_id);
                const title = [
                  row.rollout_id,
                  `reward ${number(value(row))}`,
                  ...Object.entries(row.by_agent).map(([name, given]) => `${name} ${number(given)}`),
                  its ? `${count(its.calls, "call")}, ${count(Object.values(its.tools).reduce((a, b) => a + b, 0), "tool call")}` : "",
                  row.error ?? "",
                ];
                return (
                  <a
                    key={row.rollout_id}
                    class={`cell ${shade(value(row), low, high)} ${filtered && !passes(row) ? "faded" : ""} ${row.status === "succeeded" ? "" : "failed"}`}
                    href={href("run", run, "rollout", row.rollout_id)}
                    title={title.filter(Boolean).join("\n")}
                  >
                    {row.status === "succeeded" ? number(value(row), 2) : row.status === "crashed" ? `${number(value(row), 2)} ✕` : row.status === "running" ? "…" : row.status === "queued" ? "·" : "✕"}
                    {(its?.tool_errors ?? 0) > 0 && <i class="spot" title="a tool failed" />}
                  </a>
                );
              })}
            </div>
          </section>
        ))}
      </div>
      {total !== null && groups.length < total && <p class="note">{groups.length} of {total} groups …</p>}
      {groups.length > 0 && shown.length === 0 && <p class="note">Nothing matches{done ? "" : " so far"}.</p>}
    </>
  );
}

const failure = (row: RolloutRow): string => (row.kind && row.kind !== row.status ? `${row.status}: ${row.kind}` : row.status);
