// Rewards by source, and a rule against the outcome: where they part, somebody is being fooled.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type Judgement, type RewardsPage, type RunPage } from "../api";
import { Scatter, type Point } from "../charts";
import { Chip, count, go, href, number, Show, useKeys } from "../ui";
import { goesOn, lastStep, nameOf, StepPicker } from "./step";

export function Rewards({ run, mode, step, tick }: { run: string; mode: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const row = step === null ? lastStep(data.steps, mode) : data.steps.find((each) => each.mode === mode && each.step === step);
        return row === undefined ? <p class="note">No such rollout is in this store.</p> : <One key={`${row.mode}${row.step}`} run={run} mode={row.mode} step={row.step} known={data.steps} tick={goesOn(row) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, mode, step, known, tick }: { run: string; mode: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const page = useGet<RewardsPage>("rewards", { run, mode, step }, tick);
  useKeys({ u: () => go(href("run", run, "step", mode, step)) });
  return (
    <>
      <div class="head">
        <h1>Rewards of {nameOf(mode, step)}</h1>
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
  const [source, setSource] = useState(rules[0] ?? others.at(-1) ?? "");
  const points: Point[] = page.attempts.flatMap((each) => {
    const given = each.by_source[source];
    if (given === undefined || each.outcome === null) return [];
    return [{ x: given, y: each.outcome, label: `${each.rollout_id}: ${source} ${number(given)}, outcome ${number(each.outcome)}`, address: evidence(run, each, source) }];
  });
  if (page.sources.length === 0) return <p class="note">No reward was given here.</p>;
  return (
    <>
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
            {rules.includes(source) ? `What ${source} gave against the outcome. Far right and low: the rule is pleased and the task is not solved.` : `${source} against the outcome of ${count(points.length, "attempt")}`}
          </figcaption>
          <Scatter points={points} x={source} y="outcome" />
        </figure>
      )}
      <Given key={source} run={run} page={page} source={source} rule={rules.includes(source)} />
    </>
  );
}

const SHOWN = 50;

/** What one source gave to whom: where it gave much for little first, with what it said, and what it looked at. */
function Given({ run, page, source, rule }: { run: string; page: RewardsPage; source: string; rule: boolean }): JSX.Element {
  const [most, setMost] = useState(SHOWN);
  const given = (each: Judgement): number => each.by_source[source] ?? 0;
  const odd = (each: Judgement): number => given(each) - (each.outcome ?? 0);
  const rows = page.attempts.filter((each) => each.by_source[source] !== undefined).sort((a, b) => (rule ? odd(b) - odd(a) : given(a) - given(b)));
  return (
    <>
      <h2>
        What {source} gave{rule ? ", most beside the outcome first" : ", the least first"}
      </h2>
      <div class="scroll">
        <table class="rows">
          <thead>
            <tr>
              <th class="num">{source}</th>
              <th class="num">outcome</th>
              <th>rollout</th>
              <th>why</th>
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, most).map((each) => (
              <tr key={each.attempt_id}>
                <td class="num">{number(given(each))}</td>
                <td class="num">{number(each.outcome)}</td>
                <td>
                  <a href={evidence(run, each, source)}>{each.rollout_id}</a>
                </td>
                <td>{each.said[source] ?? (each.spans[source] ? "for the call or tool that this leads to" : "")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > most && (
        <button type="button" onClick={() => setMost(most + SHOWN)}>
          {number(rows.length - most)} more
        </button>
      )}
      {page.attempts.length < page.total && <p class="note">The first {number(page.attempts.length)} of {count(page.total, "attempt")} that were rewarded are named here; the table above counts all.</p>}
    </>
  );
}
