// Rewards by source, and a rule against the outcome: where they part, somebody is being fooled.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useGet, type RewardsPage, type RunPage } from "../api";
import { Scatter, type Point } from "../charts";
import { Chip, count, go, href, number, Show, useKeys } from "../ui";
import { StepPicker } from "./step";

export function Rewards({ run, mode, step, tick }: { run: string; mode: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const chosen = step ?? data.steps.filter((row) => row.mode === mode).at(-1)?.step;
        return chosen === undefined ? <p class="note">No rollout is in this store.</p> : <One key={`${mode}${chosen}`} run={run} mode={mode} step={chosen} known={data.steps} />;
      }}
    </Show>
  );
}

function One({ run, mode, step, known }: { run: string; mode: string; step: number; known: RunPage["steps"] }): JSX.Element {
  const page = useGet<RewardsPage>("rewards", { run, mode, step });
  useKeys({ u: () => go(href("run", run, "step", mode, step)) });
  return (
    <>
      <div class="head">
        <h1>Rewards of {mode === "train" ? `step ${step}` : `the tasks held out after ${step}`}</h1>
        <StepPicker run={run} screen="rewards" mode={mode} step={step} known={known} />
      </div>
      <Show of={page}>{(data) => <Sources run={run} page={data} />}</Show>
    </>
  );
}

function Sources({ run, page }: { run: string; page: RewardsPage }): JSX.Element {
  const rules = page.sources.filter((each) => each.rule).map((each) => each.source);
  const others = page.sources.filter((each) => !each.rule).map((each) => each.source);
  const [source, setSource] = useState(rules[0] ?? others.at(-1) ?? "");
  const points: Point[] = page.attempts.flatMap((each) => {
    const given = each.by_source[source];
    if (given === undefined || each.outcome === null) return [];
    return [{ x: given, y: each.outcome, label: `${each.rollout_id}: ${source} ${number(given)}, outcome ${number(each.outcome)}`, address: href("run", run, "rollout", each.rollout_id, each.attempt_id, ...(each.span_id ? [each.span_id] : [])) }];
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
    </>
  );
}
