// Rewards by source, and a rule against the outcome: where they part, somebody is being fooled.
import type { JSX } from "preact";
import { useGet, type Judgement, type RewardsPage, type RunPage } from "../api";
import { Scatter, type Point } from "../charts";
import { useParam } from "../params";
import { SortedTable, type Column } from "../table";
import { Chip, count, go, href, number, shade, Show, stepHref, useKeys } from "../ui";
import { isUnderWay, lastStep, StepPicker, stepName } from "./picker";

export function Rewards({ run, mode, step, tick }: { run: string; mode: string; step: number | null; tick: number }): JSX.Element {
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
  const page = useGet<RewardsPage>("rewards", { run, mode, step }, tick);
  useKeys({ u: () => go(stepHref(run, "step", mode, step)) });
  return (
    <>
      <div class="head">
        <h1>Rewards of {stepName(mode, step)}</h1>
        <StepPicker run={run} screen="rewards" mode={mode} step={step} known={known} />
      </div>
      <Show of={page}>{(data) => <Sources run={run} page={data} />}</Show>
    </>
  );
}

/** Where it shows why a source gave what it gave: the span that it judged, or said so in. */
const evidence = (run: string, each: Judgement, source: string): string => {
  const span = each.spans[source];
  return href("run", run, "rollout", each.rollout_id, each.attempt_id, ...(span ? [span] : []));
};

function Sources({ run, page }: { run: string; page: RewardsPage }): JSX.Element {
  const rules = page.sources.filter((each) => each.rule).map((each) => each.source);
  const others = page.sources.filter((each) => !each.rule).map((each) => each.source);
  const [named, setSource] = useParam("source");
  const source = page.sources.some((each) => each.source === named) ? named : (rules[0] ?? others.at(-1) ?? "");
  const points: Point[] = page.attempts.flatMap((each) => {
    const given = each.by_source[source];
    if (given === undefined || each.outcome === null) return [];
    return [{ x: given, y: each.outcome, label: `${each.rollout_id}: ${source} ${number(given)}, outcome ${number(each.outcome)}`, address: evidence(run, each, source) }];
  });
  if (page.sources.length === 0) return <p class="note">No reward was given here.</p>;
  return (
    <>
      <div class="two">
      <div class="scroll">
        <table class="rows">
          <thead>
            <tr>
              <th>source</th>
              <th class="num">rewards</th>
              <th class="num">mean</th>
              <th class="num">lowest</th>
              <th class="num">highest</th>
            </tr>
          </thead>
          <tbody>
            {page.sources.map((each) => (
              <tr key={each.source}>
                <td>
                  <button type="button" class="link" aria-pressed={each.source === source} onClick={() => setSource(each.source)}>
                    {each.source}
                  </button>{" "}
                  {each.rule && <Chip>automatic rule</Chip>}
                </td>
                <td class="num">{number(each.rewards)}</td>
                <td class="num">{number(each.mean)}</td>
                <td class="num">{number(each.low)}</td>
                <td class="num">{number(each.high)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {points.length > 0 && page.sources.length > 1 && (
        <figure class="card">
          <figcaption>
            {rules.includes(source) ? `What ${source} gave against the outcome. Far right and low: the rule pays, and the task is not solved.` : `${source} against the outcome of ${count(points.length, "attempt")}`}
          </figcaption>
          <Scatter points={points} x={source} y="outcome" />
        </figure>
      )}
      </div>
      <Given key={source} run={run} page={page} source={source} rule={rules.includes(source)} />
    </>
  );
}

/** What one source gave to whom, with its reason; the rollout with the lowest reward of any agent first. */
function Given({ run, page, source, rule }: { run: string; page: RewardsPage; source: string; rule: boolean }): JSX.Element {
  const rows = page.attempts.filter((each) => each.by_source[source] !== undefined);
  const agents = [...new Set(rows.flatMap((each) => Object.keys(each.by_agent)))].sort();
  const given = (each: Judgement): number => each.by_source[source] ?? 0;
  const reward = (value: number | null | undefined): JSX.Element => <span class={`cell ${shade(value)}`}>{number(value)}</span>;
  const columns: Column<Judgement>[] = [
    { name: "task", text: true, value: (each) => each.task, cell: (each) => <a class="clip" href={evidence(run, each, source)}>{each.task || each.rollout_id}</a> },
    { name: "lowest", label: agents.length > 1 ? "lowest agent" : "reward", title: "the lowest reward of any agent", value: (each) => each.lowest, cell: (each) => reward(each.lowest) },
    { name: "outcome", title: "reward without automatic rules", value: (each) => each.outcome, cell: (each) => reward(each.outcome) },
    ...(agents.length > 1 ? agents.map((name) => ({ name: `of ${name}`, label: name, value: (each: Judgement) => each.by_agent[name] })) : []),
    { name: "given", label: source, value: given },
    ...(rule ? [{ name: "excess", title: "what the rule gave above the outcome", value: (each: Judgement) => given(each) - (each.outcome ?? 0) }] : []),
    { name: "why", text: true, value: (each) => each.said[source], cell: (each) => each.said[source] ?? (each.spans[source] ? "for one call or tool: open the task to see it" : "") },
  ];
  return (
    <>
      <h2>Rollouts with a reward from {source}</h2>
      <SortedTable label="rewards" columns={columns} rows={rows} first="lowest" />
      {page.attempts.length < page.total && <p class="note">Only {number(page.attempts.length)} of {count(page.total, "rewarded attempt")} are listed, those with the lowest rewards. The table above counts all of them.</p>}
    </>
  );
}
