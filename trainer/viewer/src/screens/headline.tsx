// The result of a run at a glance: one sentence, four numbers, and the held-out reward of each agent.
import type { ComponentChildren, JSX } from "preact";
import type { HeldOut, PolicyRow, RunPage } from "../api";
import { Agent, Chip, compact, count, duration, fixed, stepHref } from "../ui";

export type Tone = "" | "good" | "bad";

export function Figure({ label, value, tone = "", address, children }: { label: string; value: string; tone?: Tone; address?: string | undefined; children: ComponentChildren }): JSX.Element {
  return (
    <div class="figure">
      <dt>{label}</dt>
      <dd>
        <b class={tone}>{address ? <a href={address}>{value}</a> : value}</b>
        <small>{children}</small>
      </dd>
    </div>
  );
}

/** Whether the interval of a difference is on one side of 0. */
export const toneOf = (of: { low: number | null; high: number | null }): Tone => ((of.low ?? 0) > 0 ? "good" : (of.high ?? 0) < 0 ? "bad" : "");

export const interval = (low: number | null | undefined, high: number | null | undefined): string => (typeof low === "number" && typeof high === "number" ? `${fixed(low)} to ${fixed(high)}` : "");

export const rise = (value: number | null | undefined): string => (typeof value !== "number" ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : "±"}${fixed(Math.abs(value))}`);

function Difference({ of }: { of: HeldOut | undefined }): JSX.Element {
  const known = of !== undefined && of.difference !== null;
  return (
    <Figure label="Held-out reward, trained agents" value={known ? rise(of.difference) : "–"} tone={known ? toneOf(of) : ""}>
      {known ? `${interval(of.low, of.high)} (95 %, ${count(of.tasks, "task")})` : "needs two validations: --val"}
    </Figure>
  );
}

export function Headline({ run, page }: { run: string; page: RunPage }): JSX.Element {
  const { sentence, held_out, best, best_folder, cost } = page.headline;
  const last = held_out[0]?.points.at(-1);
  return (
    <section class="headline card" aria-label="result">
      <p class="lead">{sentence}</p>
      <dl class="figures">
        <Difference of={held_out[0]} />
        <Figure
          label="Best checkpoint"
          value={best === null ? "–" : best.step === 0 ? "base model" : `step ${best.step}`}
          address={best === null ? undefined : stepHref(run, "step", "val", best.step)}
        >
          {best === null ? (
            "needs held-out tasks"
          ) : (
            <>
              held-out reward {fixed(best.mean)}
              {last && last.step !== best.step && `, last ${fixed(last.mean)}`}
              {best_folder && (
                <>
                  {" "}in <code title="A folder of the run: serve it with lightning-rl serve">{best_folder}</code>
                </>
              )}
            </>
          )}
        </Figure>
        <Figure label="Alarms" value={String(page.alarms.length)} tone={page.alarms.length ? "bad" : ""}>
          {page.alarms.length ? <a href="#alarms" onClick={(e) => (e.preventDefault(), document.getElementById("alarms")?.scrollIntoView())}>read them below</a> : "none was raised"}
        </Figure>
        <Figure label="Cost" value={duration(cost.seconds ? cost.seconds * 1000 : null)}>
          {count(cost.rollouts, "rollout")}
          {cost.tokens_generated > 0 && `, ${compact(cost.tokens_generated)} tokens generated`}
        </Figure>
      </dl>
      {held_out.length > 1 && <ByAgent run={run} agents={held_out.slice(1)} />}
      {page.policies.length > 0 && <ByPolicy run={run} policies={page.policies} />}
    </section>
  );
}

function ByAgent({ run, agents }: { run: string; agents: HeldOut[] }): JSX.Element {
  const [first, last] = [agents[0]?.points[0]?.step, agents[0]?.points.at(-1)?.step];
  return (
    <div class="scroll" role="group" aria-label="held-out reward by agent" tabIndex={0}>
      <table class="by-agent">
        <thead>
          <tr>
            <th>held-out reward of</th>
            <th class="num">{first === undefined ? "first" : <a href={stepHref(run, "step", "val", first)}>{first === 0 ? "before" : `step ${first}`}</a>}</th>
            <th class="num">{last === undefined ? "last" : <a href={stepHref(run, "step", "val", last)}>{`step ${last}`}</a>}</th>
            <th class="num">difference, 95 %</th>
          </tr>
        </thead>
        <tbody>
          {agents.map((each) => (
            <tr key={each.agent}>
              <th scope="row">
                <Agent name={each.agent} /> {!each.trained && <Chip kind="quiet">not trained</Chip>}
              </th>
              <td class="num">{fixed(each.points[0]?.mean)}</td>
              <td class="num">{each.points.length > 1 ? fixed(each.points.at(-1)?.mean) : "–"}</td>
              <td class="num">
                <b class={toneOf(each)}>{rise(each.difference)}</b> <small>{interval(each.low, each.high)}</small>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The best weights of each policy, and how often it was returned to them. */
function ByPolicy({ run, policies }: { run: string; policies: PolicyRow[] }): JSX.Element {
  return (
    <div class="scroll" role="group" aria-label="best weights by policy" tabIndex={0}>
      <table class="by-agent">
        <thead>
          <tr>
            <th>policy</th>
            <th class="num">best held-out reward</th>
            <th class="num">after</th>
            <th class="num">last</th>
            <th class="num">returned to its best</th>
            <th>best weights</th>
          </tr>
        </thead>
        <tbody>
          {policies.map((each) => (
            <tr key={each.policy}>
              <th scope="row">
                {each.policy} {each.agents.map((name) => name !== each.policy && <Agent key={name} name={name} />)}
              </th>
              <td class="num">{fixed(each.best)}</td>
              <td class="num">{each.best_step === null ? "–" : <a href={stepHref(run, "step", "val", each.best_step)}>{each.best_step === 0 ? "before training" : `step ${each.best_step}`}</a>}</td>
              <td class="num">{fixed(each.last)}</td>
              <td class="num">{each.rollbacks.length ? each.rollbacks.map((back) => `after step ${back.after}`).join(", ") : "never"}</td>
              <td>{each.folder ? <code>{each.folder}</code> : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
