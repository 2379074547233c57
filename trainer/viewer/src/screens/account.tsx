// The account of a step: the way from calls seen to calls trained, each loss with its reason and its calls.
import type { JSX } from "preact";
import { useGet, type AccountPage, type CallLink, type RunPage } from "../api";
import { Agent, Chip, Clipped, count, go, href, number, shade, Show, Signed, stepHref, useKeys } from "../ui";
import { isUnderWay, lastEnded, StepPicker, stepName } from "./picker";

export const Links = ({ run, links }: { run: string; links: CallLink[] }): JSX.Element => (
  <ul class="links">
    {links.map((link, at) => (
      <li key={at}>
        <a href={link.span_id ? href("run", run, "call", link.rollout_id, link.attempt_id, link.span_id) : href("run", run, "rollout", link.rollout_id, link.attempt_id)}>
          {link.span_id ? `call ${link.turn}` : "attempt"}
        </a>
        {link.agent !== null && <Agent name={link.agent} />}
        {link.advantage !== null && link.advantage !== undefined && <Signed value={link.advantage} title="advantage" />}
        <span class="said-to">
          <span class="snippet">{link.text}</span>
          {(link.task || typeof link.reward === "number") && <TaskLine task={link.task} reward={link.reward} times={link.times} />}
        </span>
      </li>
    ))}
  </ul>
);

/** What a call was for, what its rollout earned, and how many calls are identical to it. */
export const TaskLine = ({ task, reward, times = 1 }: { task: string | undefined; reward: number | null | undefined; times?: number | undefined }): JSX.Element => (
  <small class="task-line">
    <span class={`cell ${shade(reward)}`} title="reward of the rollout">
      {number(reward, 2)}
    </span>
    <span class="clip" title={task}>
      {task}
    </span>
    {times > 1 && <Chip title="the same agent gave the same answer to the same task">{number(times)} identical</Chip>}
  </small>
);

export function Account({ run, step, tick }: { run: string; step: number | null; tick: number }): JSX.Element {
  const known = useGet<RunPage>("run", { run }, tick);
  return (
    <Show of={known}>
      {(data) => {
        const chosen = step ?? lastEnded(data.steps);
        if (chosen === undefined) return <p class="note">No training step has ended in this run.</p>;
        const row = data.steps.find((each) => each.mode === "train" && each.step === chosen);
        return <One key={chosen} run={run} step={chosen} known={data.steps} tick={isUnderWay(row) ? tick : 0} />;
      }}
    </Show>
  );
}

function One({ run, step, known, tick }: { run: string; step: number; known: RunPage["steps"]; tick: number }): JSX.Element {
  const page = useGet<AccountPage>("account", { run, step }, tick);
  useKeys({ u: () => go(stepHref(run, "step", "train", step)) });
  return (
    <>
      <div class="head">
        <h1>Account of {stepName("train", step)}</h1>
        <StepPicker run={run} screen="account" mode="train" step={step} known={known} />
      </div>
      <Show of={page}>{(data) => <Funnel run={run} page={data} />}</Show>
    </>
  );
}

function Funnel({ run, page }: { run: string; page: AccountPage }): JSX.Element {
  const share = (n: number, of: number): { width: string } => ({ width: `${of ? Math.max(0.4, (n / of) * 100) : 0}%` });
  return (
    <>
      {page.same_as_run === false && <p class="note bad">These numbers, computed from the store, differ from those that the run wrote: a reward, a rule or an option has changed since.</p>}
      <section class="card funnel">
        <Bar label="calls seen" n={page.seen} style={share(page.seen, page.seen)} kind="seen" />
        {page.losses.map((loss) => (
          <details key={loss.reason}>
            <summary>
              <Bar label={loss.reason} n={-loss.calls} style={share(loss.calls, page.seen)} kind="loss" />
            </summary>
            <Links run={run} links={loss.links} />
            {loss.links.length < loss.calls && <p class="dim">{number(loss.links.length)} of {count(loss.calls, "call")} are named</p>}
          </details>
        ))}
        <Bar label="calls trained" n={page.trained} style={share(page.trained, page.seen)} kind="kept" />
        <Bar label="merged onto an earlier call’s row" n={page.merged} style={share(page.merged, page.seen)} kind="quiet" />
        <Bar label="training rows" n={page.rows} style={share(page.rows, page.seen)} kind="kept" />
        <Bar label="rows without signal: all rewards of their group are equal" n={page.rows_without_gradient} style={share(page.rows_without_gradient, page.seen)} kind="loss" />
      </section>
      <section class="card funnel">
        <Bar label="tokens in the rows" n={page.tokens_in_rows} style={share(page.tokens_in_rows, page.tokens_in_rows)} kind="seen" />
        <Bar label="tokens trained" n={page.tokens} style={share(page.tokens, page.tokens_in_rows)} kind="kept" />
        {page.tokens_steered > 0 && <Bar label="left out of the loss: constrained by a grammar or similar" n={page.tokens_steered} style={share(page.tokens_steered, page.tokens_in_rows)} kind="loss" />}
      </section>
      <section class="card">
      <table class="pairs">
        <tbody>
          <tr>
            <th scope="row">calls with the agent’s span and the gateway’s record</th>
            <td>{number(page.joined)}</td>
          </tr>
          {Object.entries(page.unjoined).map(([reason, n]) => (
            <tr key={reason}>
              <th scope="row">without: {reason}</th>
              <td>{number(n)}</td>
            </tr>
          ))}
          <tr>
            <th scope="row">calls that go on from an earlier one and hold its own tokens</th>
            <td>{number(page.continued)}</td>
          </tr>
          {Object.entries(page.not_continued).map(([reason, n]) => (
            <tr key={reason}>
              <th scope="row">that do not: {reason}</th>
              <td>{number(n)}</td>
            </tr>
          ))}
          {Object.entries(page.unclaimed).map(([agent, n]) => (
            <tr key={agent}>
              <th scope="row">rewards for {agent} that reached no call</th>
              <td>{number(n)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      </section>
    </>
  );
}

const Bar = ({ label, n, style, kind }: { label: string; n: number; style: { width: string }; kind: string }): JSX.Element => (
  <div class="funnel-bar">
    <span>
      <Clipped text={label} />
    </span>
    <b data-testid={label}>{n < 0 ? `−${number(-n)}` : number(n)}</b>
    <i class={kind} style={style} />
  </div>
);
